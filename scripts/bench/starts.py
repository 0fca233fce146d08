"""Seconds from the command to the first step of configs/digits.yaml on one device, by phases.

    python scripts/bench/starts.py [--rounds 5]

The baseline is a loop written by hand with the same model, optimizer and batch. Each start runs in its own
process; the two alternate. A first start of each, which is not counted, fills the compilation cache. The
table has the minimum of all rounds: CPU seconds and, in brackets, wall seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "configs" / "digits.yaml"
LOADED, BUILT, STEPPED = PARTS = "libraries and data loaded", "model built and checked", "first step"
_LIMIT_S = 120


def mark(what: str) -> None:
    """Writes down (CPU seconds, wall seconds) since this process started."""
    at_s = time.process_time(), time.time() - float(os.environ["STARTS_BEGAN_S"])
    with open(os.environ["STARTS_MARKS"], "a") as file:
        file.write(json.dumps([what, *at_s]) + "\n")


def one_start(words: list[str], cache: str) -> dict[str, tuple[float, float]]:
    """(CPU seconds, wall seconds) of each mark of the process that runs `words`."""
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, "marks")
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONDONTWRITEBYTECODE": "",  # cache bytecode, as usual
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
            "JAX_COMPILATION_CACHE_DIR": cache,
            "STARTS_MARKS": str(marks),
            "STARTS_BEGAN_S": str(time.time()),
        }
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=_LIMIT_S)
        if not marks.is_file() or STEPPED not in (text := marks.read_text()):
            sys.exit(f"{words}: {done.returncode}\n{done.stdout}{done.stderr}")
    return {what: (cpu_s, clock_s) for what, cpu_s, clock_s in map(json.loads, text.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    train = [sys.executable, "-m", "cyxjax.train", "--config", str(CONFIG), "--run-dir", "run"]
    rows = {
        "cyxjax": [*train, "--cpu-devices", "1", "--callbacks", "starts_ours:Mark"],
        "by hand": [sys.executable, str(HERE / "starts_hand.py")],
    }
    found: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(1 + rounds):
            for name, words in rows.items():
                found[name].append(one_start(words, cache))
    print(f"| seconds after the command | {' | '.join(rows)} |\n| --- |{' ---: |' * len(rows)}")
    for what in PARTS:
        least = [[min(start[what][i] for start in found[name][1:]) for i in (0, 1)] for name in rows]
        print(f"| {what} | " + " | ".join(f"{cpu_s:.2f} ({clock_s:.2f})" for cpu_s, clock_s in least) + " |")


if __name__ == "__main__":
    main()
