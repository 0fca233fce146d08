"""Throughput of cyxjax, of a JAX loop written by hand, of torch DDP over gloo and of Keras 3 on JAX.

    python scripts/bench/peers.py [--torch-python PATH] [--keras-python PATH] [--turns 5] [--json FILE]
    python scripts/bench/peers.py --quick     # a few steps of everything, as a test
    python scripts/bench/peers.py --device gpu --peak-tflops 989 --replicas 1    # one H100; torch is compiled

Each turn of each library compared runs in its own processes, which compile, warm up and time the same number
of optimizer steps of the same work. Turns alternate (A B A B), so that other load slows all alike. Prints the
command, median samples/s, and the median over turns of the ratio of cyxjax to each library. The cell of a
library that is absent or fails gives the reason. `--write` puts the table into README.md beside this file.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from peers_work import WORKS

HERE = Path(__file__).parent
PEERS = {
    "ours": "cyxjax",
    "hand": "JAX by hand",
    "paged": "by hand, our pages",  # the same loop, started with the settings of `--pages auto`
    "torch": "torch DDP",
    "keras": "Keras 3 on JAX",
}
_LIMIT_S = 300

Turns = list[float | str]  # samples/s of each turn, or the reason for no result


def main() -> int:
    args = parse()
    cells: dict[str, dict[str, Turns]] = {}
    for work in args.works:
        for replicas in args.replicas:
            row = cells.setdefault(f"{work}, {replicas} process{'es' if replicas > 1 else ''}", {})
            for _ in range(args.turns):
                for peer in args.peers:
                    row.setdefault(peer, []).append(turn(peer, work, replicas, args))
                    print(f"{work} x {replicas}: {PEERS[peer]}: {shown(row[peer][-1])}", file=sys.stderr)
    text = table(cells, args)
    print(text)
    if args.json:
        Path(args.json).write_text(
            json.dumps({"machine": machine(args.device), "samples_per_s": cells}, indent=1) + "\n"
        )
    if args.write:
        write(HERE / "README.md", text, "peers")
    ran = all(
        isinstance(t, float) for row in cells.values() for p in ("ours", "hand") for t in row.get(p, [])
    )
    return 0 if ran else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--works", nargs="+", choices=WORKS, help="default: all but those for GPUs")
    parser.add_argument("--replicas", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense peak of one device: adds the share of it that is used"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--keras-python", default=sys.executable, help="a Python with keras and jax")
    parser.add_argument("--json", help="write the samples/s of every turn to this file")
    parser.add_argument("--write", action="store_true", help="write the table to README.md beside this file")
    parser.add_argument("--quick", action="store_true", help="a few steps, one turn, to test the program")
    args = parser.parse_args()
    args.works = args.works or [name for name, work in WORKS.items() if work.gflop is None]
    if args.quick:
        args.turns = 1
    return args


def turn(peer: str, work: str, replicas: int, args: argparse.Namespace) -> float | str:
    """Samples/s of one turn, or the reason for no result."""
    script = [
        str(HERE / f"peers_{peer.replace('paged', 'hand')}.py"),
        work,
        str(replicas),
        "--device",
        args.device,
    ]
    script += ["--quick"] if args.quick else []
    if peer == "keras" or (replicas == 1 and peer != "paged"):
        command = [python_of(peer, args), *script]
    elif peer == "torch":
        agent = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(replicas),
            "--master-port",
            free_port(),
        ]
        command = [args.torch_python, *agent, *script]
    else:
        pages = "off" if peer == "hand" else "auto"
        launcher = ["-m", "cyxjax.launch", "--nproc-per-node", str(replicas), "--pages", pages]
        command = [sys.executable, *launcher, *script]
    return read(*run(command, replicas if peer == "keras" else 1, args.device))


def python_of(peer: str, args: argparse.Namespace) -> str:
    return {"torch": args.torch_python, "keras": args.keras_python}.get(peer, sys.executable)


def run(command: list[str], devices: int, device: str = "cpu", limit_s: float = _LIMIT_S) -> tuple[str, str]:
    """(stdout, stderr) of a command in its own session, whose processes are killed at the end."""
    env = {**os.environ, "JAX_PLATFORMS": {"gpu": "cuda"}.get(device, device), "PEERS_PORT": free_port()}
    if devices > 1:  # one thread per core is too few for several devices in one process
        env["NPROC"] = str(max(devices, os.cpu_count() or 1))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes) as process:
        try:
            return process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "", f"nothing within {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def output_of(ranks: list[subprocess.Popen], limit_s: float) -> str:
    """The output of rank 0, or "" if the ranks do not end in time; kills all their sessions at the end."""
    try:
        out = ranks[0].communicate(timeout=limit_s)[0]
        for process in ranks[1:]:
            process.wait(timeout=30)
        return out
    except subprocess.TimeoutExpired:
        return ""
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(out: str, errors: str) -> float | str:
    """The samples/s that `say` printed; otherwise "not run: " and the last line of the errors."""
    for line in reversed(out.splitlines()):
        at = line.find('{"samples_per_s"')  # after the rank, which the launcher prepends
        if at >= 0:
            return float(json.loads(line[at:])["samples_per_s"])
    lines = [line for line in errors.splitlines() if "Error" in line] or errors.splitlines()[-1:]
    return "not run: " + (lines[-1].strip()[:80] if lines else "no result")


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def table(cells: dict[str, dict[str, Turns]], args: argparse.Namespace) -> str:
    """Markdown: median samples/s, and in brackets the ratio of cyxjax to each library."""
    others = [peer for peer in args.peers if peer != "ours"]
    lines = [
        f"{machine(args.device)}; `python scripts/bench/peers.py`, {args.turns} turns, medians; in brackets "
        f"cyxjax's rate divided by this one{'; in % the share of the peak' if args.peak_tflops else ''}.",
        "",
        f"| samples/s | {' | '.join(PEERS[peer] for peer in args.peers)} |",
        f"| --- |{' ---: |' * len(args.peers)}",
    ]
    for row, turns in cells.items():
        shares = {peer: ratio(turns.get("ours", []), turns[peer]) for peer in others}
        work = WORKS.get(row.split(",")[0])
        used = partial(of_peak, work and work.gflop, args.peak_tflops)
        shown_cells = [
            f"{middle(turns[peer])}{used(turns[peer])}{f' ({shares[peer]})' if shares.get(peer) else ''}"
            for peer in args.peers
        ]
        lines.append(f"| {row} | {' | '.join(shown_cells)} |")
    return "\n".join(lines)


def middle(turns: Turns) -> str:
    known = [t for t in turns if isinstance(t, float)]
    return f"{statistics.median(known):,.0f}" if known else shown(turns[-1])


def of_peak(gflop: float | None, peak_tflops: float | None, turns: Turns) -> str:
    """Model FLOPs utilization (MFU), the share of the device's peak that is used; "" if it is not known."""
    known = [t for t in turns if isinstance(t, float)]
    return (
        f", {statistics.median(known) * gflop / peak_tflops / 10:.0f} %"
        if gflop and peak_tflops and known
        else ""
    )


def ratio(ours: Turns, theirs: Turns) -> str:
    """The median of the ratios of turns that ran one after the other."""
    pairs = [
        a / b for a, b in zip(ours, theirs, strict=False) if isinstance(a, float) and isinstance(b, float)
    ]
    return f"{statistics.median(pairs):.2f}" if pairs else ""


def shown(value: float | str) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else value.replace("|", "/")


def machine(device: str = "cpu") -> str:
    name = platform.machine()
    if device == "gpu":
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True
        )
        name = names.stdout.decode().splitlines()[0]
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def write(readme: Path, text: str, name: str) -> None:
    """Replaces the text between the marks `name` in the file."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    whole = readme.read_text()
    before, _, rest = whole.partition(begin)
    _, _, after = rest.partition(end)
    assert rest, f"{readme} has no mark {begin}"
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
