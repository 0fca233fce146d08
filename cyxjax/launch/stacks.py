"""Reading faulthandler's dumps: where each rank's main thread stands."""

import os
import re
from dataclasses import dataclass

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

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} {self.name}"


def main_thread(dump: str) -> list[Frame]:
    """The frames of the main thread in the newest dump, innermost first; [] when there is none.

    The kernel hands a signal to the main thread, which faulthandler therefore calls the current one.
    """
    blocks = re.split(r"\n\n|\n(?=Thread 0x|Current thread 0x)", dump.strip())
    current = [block for block in blocks if block.startswith("Current thread")]
    chosen = current[-1] if current else blocks[-1] if blocks else ""
    found = (_FRAME.match(line) for line in chosen.splitlines())
    return [Frame(m["file"], int(m["line"]), m["name"]) for m in found if m]


def where(frames: list[Frame]) -> str:
    """'train.py:88 slow_loader': the innermost frame that is the user's; '' for an empty stack."""
    own = [frame for frame in frames if not frame.is_library] or frames
    return str(own[0]) if own else ""


def is_inside_jax(frames: list[Frame]) -> bool:
    """True when the innermost frame belongs to jax: the rank is in a compiled step, or waits in one."""
    return bool(frames) and bool(re.search(r"site-packages[/\\](jax|jaxlib|flax|numpy)[/\\]", frames[0].file))
