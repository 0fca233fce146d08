"""Seconds from the SIGKILL of one rank to the next step of the whole group, divided into phases.

    python scripts/bench/restart.py [--ranks 2] [--rounds 3] [--torch-python PYTHON]

A small model on the CPU. With --torch-python, torchrun with the same model alternates with cyxjax.launch.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 60
PARTS = (
    ("noticed, processes started", "killed", "began"),
    ("libraries loaded", "began", "loaded"),
    ("group formed", "loaded", "formed"),
    ("model built, first step", "formed", "stepped"),
    ("total", "killed", "stepped"),
)


def command(python: str, ranks: int, ours: bool) -> list[str]:
    if ours:
        launcher = [python, "-m", "cyxjax.launch", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
        return [*launcher, str(HERE / "restart_ours.py")]
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [
        *launcher,
        f"--nproc-per-node={ranks}",
        "--max-restarts=1",
        "--monitor-interval=0.1",
        str(HERE / "restart_torch.py"),
    ]


def one_round(words: list[str]) -> dict[str, float] | None:
    """Seconds at which the last rank passed each mark; None if the group fails, whose output is printed."""
    with tempfile.TemporaryDirectory() as folder:  # also for error files of the launchers
        own = {"JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": folder}
        env = os.environ | own | {"PYTHONDONTWRITEBYTECODE": ""}  # cache bytecode, as usual
        marks, output = Path(folder) / "marks", Path(folder) / "output"
        with output.open("w") as file:
            process = subprocess.Popen([*words, str(marks)], env=env, stdout=file, stderr=file)
            code = end_of(process)
        if code != 0:
            print(f"{words[2]}: {code}\n{output.read_text()[-2000:]}", file=sys.stderr)
            return None
        lines = [line.split() for line in marks.read_text().splitlines()]
    return {what: max(float(at) for name, _, at in lines if name == what) for what, _, _ in lines}


def end_of(process: subprocess.Popen) -> int | str:
    """The exit code of `process`; after the limit terminates it with its ranks and returns a message."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(LIMIT_S)
        return f"not done after {LIMIT_S} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch-python", default="", help="a Python with torch")
    args = parser.parse_args()
    rows = {"cyxjax.launch": command(sys.executable, args.ranks, ours=True)}
    if args.torch_python:
        rows["torchrun"] = command(args.torch_python, args.ranks, ours=False)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name, words in rows.items():
            if (marks := one_round(words)) is not None:
                found[name].append(marks)
    print(f"{'median of ' + str(args.rounds) + ', seconds':34}" + "".join(f"{name:>16}" for name in rows))
    for label, start, end in PARTS:
        spans = [[marks[end] - marks[start] for marks in found[name]] for name in rows]
        print(f"{label:34}" + "".join(f"{statistics.median(s):16.2f}" if s else f"{'-':>16}" for s in spans))


if __name__ == "__main__":
    main()
