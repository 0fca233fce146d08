"""`cyxjax launch --dump JOB`: the stacks of every rank of a running job on this host, without stopping it.

Also reads such dumps of faulthandler: where a rank's main thread is, and the thread it waits for.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cyxjax.errors import EXIT_OK, GroupError
from cyxjax.files import is_installed, text_in
from cyxjax.launch import heartbeat
from cyxjax.launch.failure import hooks
from cyxjax.launch.output import ranks_text
from cyxjax.launch.supervise.processes import PROC, identity, stat
from cyxjax.launch.supervise.worker import LAUNCHER
from cyxjax.redaction import redact

WAIT_S = 1.0  # a rank writes its stacks within milliseconds


@dataclass(frozen=True)
class RunningRank:
    """A rank of some job on this host, as its process shows it."""

    pid: int
    launcher: int
    rank: int
    run_id: str
    stack_file: str
    beat_file: str = ""


def main(words: Sequence[str]) -> int:
    """Prints the stacks of the ranks of the job that `words` names.

    words: the job's run id, or the process number of its launcher or of a rank; none where one job runs.
    Raises: GroupError when no such job runs here.
    """
    for rank, text in collect(find(" ".join(words), running(PROC))).items():
        print(_shown(rank, text), flush=True)
    return EXIT_OK


def collect(ranks: Sequence[RunningRank]) -> dict[RunningRank, str]:
    """What each rank dumps when it is asked to; "" for one that cannot answer."""
    old = {rank: len(text_in(rank.stack_file)) for rank in ranks}
    asked = [rank for rank in ranks if _asked(rank)]
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and any(len(text_in(rank.stack_file)) == old[rank] for rank in asked):
        time.sleep(0.02)
    time.sleep(0.05)  # the last thread's frames follow within this
    return {rank: text_in(rank.stack_file)[old[rank] :] for rank in ranks}


def _asked(rank: RunningRank) -> bool:
    """Asks `rank` for its stacks; not if it is suspended, or its program has not reported anything to us."""
    found = stat(rank.pid)
    can_answer = found is not None and not found.is_stopped and heartbeat.read(rank.beat_file).at_s > 0
    if can_answer:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(rank.pid, signal.SIGUSR2)
    return can_answer


def find(job: str, ranks: Sequence[RunningRank]) -> list[RunningRank]:
    """The ranks of `job`, in order; with "" of the only job. Raises: GroupError that lists the jobs."""
    chosen = {rank.launcher for rank in ranks if job in ("", rank.run_id, str(rank.launcher), str(rank.pid))}
    if not chosen or (not job and len(chosen) > 1):
        jobs = sorted({(rank.run_id, rank.launcher) for rank in ranks})
        of = {pid: ranks_text(rank.rank for rank in ranks if rank.launcher == pid) for _, pid in jobs}
        here = "; ".join(f"{run_id} (launcher {pid}, {of[pid]})" for run_id, pid in jobs)
        what = f"no job {job!r} of yours runs" if job else "not exactly one job of yours runs"
        raise GroupError(
            f"{what} on this host; running: {here or 'none'}. HINT: give one of these run ids or pids."
        )
    return sorted((rank for rank in ranks if rank.launcher in chosen), key=lambda rank: rank.rank)


def running(processes: Path) -> list[RunningRank]:
    """Ranks that launchers of this user have started on this host, and that are still their children.

    A process that a rank has started has the rank's environment, but a different parent, also as an orphan.
    """
    return [rank for folder in processes.glob("[0-9]*") if (rank := _read(folder)) is not None]


def _read(folder: Path) -> RunningRank | None:
    try:
        entries = folder.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # another user's, or one that ended while we looked
        return None
    env = dict(entry.partition("=")[::2] for entry in entries if "=" in entry)
    own = stat(int(folder.name), folder.parent)
    if own is None or env.get(LAUNCHER) != identity(own.parent, folder.parent):
        return None
    return RunningRank(
        pid=int(folder.name),
        launcher=own.parent,
        rank=int(env["RANK"]),
        run_id=env.get("CYXJAX_RUN_ID", ""),
        stack_file=env[hooks.STACKS],
        beat_file=env.get(heartbeat.VARIABLE, ""),
    )


def _shown(rank: RunningRank, text: str) -> str:
    if not text:
        return f"--- rank {rank.rank} (pid {rank.pid}): no answer; it is suspended or not in the group yet"
    at = where(helpers(text) or main_thread(text))
    return f"--- rank {rank.rank} (pid {rank.pid}): at {at}\n{redact(text)}"


_PACKAGE = Path(__file__).parents[2]
_OURS = f"{_PACKAGE}{os.sep}", f"{_PACKAGE.resolve()}{os.sep}"  # as it was imported, and without links
_WAITS = ("threading.py", "queue.py", "_base.py", "selectors.py")  # where Python code waits for a thread
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    name: str

    @property
    def is_library(self) -> bool:
        """True for installed packages, the standard library and the launcher, but not the rest of cyxjax."""
        if self.is_ours:
            return f"cyxjax{os.sep}launch{os.sep}" in self.file
        return self.file[0] == "<" or f"{os.sep}lib{os.sep}python" in self.file or is_installed(self.file)

    @property
    def is_ours(self) -> bool:
        """True for the files of this package."""
        return self.file.startswith(_OURS)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.name}"


def main_thread(dump: str) -> list[Frame]:
    """The frames of the main thread in the newest dump, innermost first; [] when there is none.

    The kernel hands a signal to the main thread, which faulthandler therefore calls the current one.
    """
    blocks = _blocks(dump)
    return _frames(next((b for b in reversed(blocks) if b.startswith("Current thread")), blocks[-1]))


def helpers(dump: str) -> list[Frame]:
    """Where the user's own code is in threads other than the main one: its innermost frame in each.

    [] unless the main thread waits for a thread, such as one that loads data ahead. Threads that are only
    in libraries or in this package are left out.
    """
    main = main_thread(dump)
    if not main or not (main[0].is_ours or os.path.basename(main[0].file) in _WAITS):
        return []
    stacks = [_frames(block) for block in _blocks(dump) if block.startswith("Thread 0x")]
    return list(dict.fromkeys(filter(None, map(users, stacks))))


def _blocks(dump: str) -> list[str]:
    """The text of each thread's stack."""
    return re.split(r"\n\n|\n(?=Thread 0x|Current thread 0x)", dump.strip())


def _frames(block: str) -> list[Frame]:
    found = (_FRAME.match(line) for line in block.splitlines())
    return [Frame(m["file"], int(m["line"]), m["name"]) for m in found if m]


def where(frames: list[Frame]) -> str:
    """'train.py:88 slow_loader': the innermost frame that is the user's; '' for an empty stack."""
    own = [frame for frame in frames if not frame.is_library] or frames
    return str(own[0]) if own else ""


def users(frames: list[Frame]) -> Frame | None:
    """The innermost frame of the user's own code."""
    return next((frame for frame in frames if not (frame.is_library or frame.is_ours)), None)


def waits_for_others(frames: list[Frame]) -> bool:
    """True in a compiled step, and where ranks exchange what they are about to do. frames: at least one."""
    exchanges = frames[0].is_ours and frames[0].name == "exchange"
    return exchanges or is_inside_jax(frames)


def is_inside_jax(frames: list[Frame]) -> bool:
    """True when the innermost frame belongs to jax: the rank is in a compiled step, or waits in one."""
    return bool(frames) and bool(
        re.search(r"(site|dist)-packages[/\\](jax|jaxlib|flax|numpy)[/\\]", frames[0].file)
    )
