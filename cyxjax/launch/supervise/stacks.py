"""Reading faulthandler's dumps: where each rank's main thread stands, and the thread it waits for."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
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
        """True for installed packages, the standard library and this room."""
        folders = ("site-packages", f"{os.sep}lib{os.sep}python", f"cyxjax{os.sep}launch{os.sep}")
        return self.file[0] == "<" or any(folder in self.file for folder in folders)

    @property
    def is_ours(self) -> bool:
        """True for the files of this package."""
        return self.file.startswith(_PACKAGE)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.name}"


def main_thread(dump: str) -> list[Frame]:
    """The frames of the main thread in the newest dump, innermost first; [] when there is none.

    The kernel hands a signal to the main thread, which faulthandler therefore calls the current one.
    """
    blocks = re.split(r"\n\n|\n(?=Thread 0x|Current thread 0x)", dump.strip())
    current = [block for block in blocks if block.startswith("Current thread")]
    chosen = current[-1] if current else blocks[-1] if blocks else ""
    return _frames(chosen)


def helpers(dump: str) -> list[Frame]:
    """Where the user's own code stands in threads other than the main one: its innermost frame in each.

    [] unless the main thread waits for a thread, such as one that loads data ahead. Threads that are only
    in libraries or in this package are left out.
    """
    main = main_thread(dump)
    if not main or not (main[0].is_ours or os.path.basename(main[0].file) in _WAITS):
        return []
    blocks = re.split(r"\n\n|\n(?=Thread 0x|Current thread 0x)", dump.strip())
    stacks = [_frames(block) for block in blocks if block.startswith("Thread 0x")]
    own = [[f for f in frames if not (f.is_library or f.is_ours)] for frames in stacks]
    return list(dict.fromkeys(frames[0] for frames in own if frames))


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
    """True in a compiled step, and where ranks exchange what they are about to do."""
    innermost = frames[0] if frames else None
    exchanges = innermost is not None and innermost.is_ours and innermost.name == "exchange"
    return exchanges or is_inside_jax(frames)


def is_inside_jax(frames: list[Frame]) -> bool:
    """True when the innermost frame belongs to jax: the rank is in a compiled step, or waits in one."""
    return bool(frames) and bool(re.search(r"site-packages[/\\](jax|jaxlib|flax|numpy)[/\\]", frames[0].file))
