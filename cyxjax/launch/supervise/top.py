"""`cyxjax top [JOB]`: the progress of the ranks of a running job on this host, and who waits for whom.

Read from their heartbeat files and the kernel, without disturbing the job.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cyxjax.command import Parser, number
from cyxjax.errors import EXIT_OK
from cyxjax.launch import heartbeat
from cyxjax.launch.heartbeat import WAITING, Progress
from cyxjax.launch.output import printable, ranks_text
from cyxjax.launch.supervise.dump import RunningRank, find, running
from cyxjax.launch.supervise.processes import PROC, identity, stat

_HOME_AND_CLEAR = "\x1b[H\x1b[J"
_HELD_UP_S = 1.0  # a rank that waits longer counts as held up


@dataclass(frozen=True)
class Row:
    """One rank at one moment."""

    rank: int
    pid: int
    progress: Progress
    memory_bytes: int | None  # resident; None for a process that has ended
    is_suspended: bool = False  # SIGSTOP, Ctrl-Z, a debugger

    def as_json(self, now_s: float) -> dict[str, object]:
        p = self.progress
        reported = {
            "step": p.step,
            "phase": p.phase,
            "for_s": round(_for_s(p, now_s), 1),
            "busy_s": p.busy_s,
            "waiting_s": p.waiting_s,
        }
        return {
            "rank": self.rank,
            "pid": self.pid,
            **(reported if p.at_s else {}),
            "memory_bytes": self.memory_bytes,
            "suspended": self.is_suspended,
        }


def main(argv: Sequence[str]) -> int:
    """Shows the ranks until the job has ended or Ctrl-C; once, if the output is not a terminal.

    Raises: ConfigError for wrong arguments; GroupError when no such job runs here.
    """
    given = _parser().parse_args(argv)
    ranks = find(given.job, running(PROC))
    job, launchers = ranks[0].run_id, {rank.launcher: identity(rank.launcher, PROC) for rank in ranks}
    once = given.once or given.json or not sys.stdout.isatty()
    with suppress(KeyboardInterrupt):
        while True:
            rows, now_s = look(ranks), time.monotonic()
            if given.json:
                print(json.dumps({"job": job, "ranks": [row.as_json(now_s) for row in rows]}))
            else:
                lines = shown(job, rows, now_s)
                print(("" if once else _HOME_AND_CLEAR) + "\n".join(lines), flush=True)
            if once:
                break
            time.sleep(given.every)
            if all(identity(pid, PROC) != name for pid, name in launchers.items()):
                print("The job has ended.")
                break
            started = (rank for rank in running(PROC) if rank.launcher in launchers)  # a restart's too
            ranks = sorted(started, key=lambda rank: rank.rank)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax top",
        description="Shows the ranks of a job that runs on this host: steps, phases, memory, who waits.",
        epilog="example: cyxjax top my-run    (its run id; none is needed where one job runs)",
    )
    parser.add_argument("job", nargs="?", default="", help="run id, or the pid of its launcher or of a rank")
    parser.add_argument(
        "--every", type=number(0.1, 3600, float), default=1.0, metavar="SECONDS", help="between updates (1)"
    )
    parser.add_argument("--once", action="store_true", help="show once, as when output is no terminal")
    parser.add_argument("--json", action="store_true", help="show once, as JSON")
    return parser


def look(ranks: Sequence[RunningRank], processes: Path = PROC) -> list[Row]:
    """The ranks as they are now, in order."""
    stats = [stat(r.pid, processes) for r in ranks]
    return [
        Row(
            r.rank,
            r.pid,
            heartbeat.read(r.beat_file),
            s.resident_bytes if s else None,
            bool(s and s.is_stopped),
        )
        for r, s in zip(ranks, stats, strict=True)
    ]


def shown(job: str, rows: Sequence[Row], now_s: float) -> list[str]:
    """The lines of the table and who waits."""
    cells = [("rank", "step", "phase", "for", "memory", "pid"), *(_cells(row, now_s) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return [f"job {printable(job) or '(unnamed)'}: {len(rows)} ranks here", *lines, waits(rows, now_s)]


def _cells(row: Row, now_s: float) -> tuple[str, ...]:
    p, memory = row.progress, row.memory_bytes
    size = "-" if memory is None else f"{memory / 1e6:,.0f} MB"
    if not p.at_s:
        return (str(row.rank), "-", "no heartbeat yet", "-", size, str(row.pid))
    step = str(p.step) if p.step >= 0 else "-"
    phase = "suspended" if row.is_suspended else p.phase
    return (str(row.rank), step, phase, f"{_for_s(p, now_s):.1f} s", size, str(row.pid))


def _for_s(progress: Progress, now_s: float) -> float:
    return max(0.0, now_s - progress.at_s)


def waits(rows: Sequence[Row], now_s: float) -> str:
    """Who waits for whom, in a sentence; "" while nobody has waited for long."""
    reporting = [row for row in rows if row.progress.at_s and row.progress.phase != "done"]
    waiting = [r for r in reporting if r.progress.phase in WAITING and not r.is_suspended]
    held = [r for r in waiting if _for_s(r.progress, now_s) > _HELD_UP_S]
    others = [r for r in reporting if r.progress.phase not in WAITING or r.is_suspended]
    if not held or not others:
        return ""
    cause = min(others, key=lambda r: (not r.is_suspended, r.progress.step, r.progress.at_s))
    at = f"{cause.progress.phase} for {_for_s(cause.progress, now_s):.0f} s, step {cause.progress.step}"
    if cause.is_suspended:
        at = f"suspended, step {cause.progress.step}. HINT: `kill -CONT {cause.pid}` resumes it"
    verb = "waits" if len(held) == 1 else "wait"
    return f"{ranks_text([r.rank for r in held])} {verb} for rank {cause.rank}: {at}"
