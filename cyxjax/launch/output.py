"""What the ranks print: read without pause, shown with the rank in front, kept in a file per rank."""

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import IO, BinaryIO

from cyxjax.launch.rendezvous.roster import ranks_text

MAX_LINE = 65_536  # a longer line is shown in pieces, so that memory stays bounded
TAIL_LINES = 50
# Chatter of the libraries below jax at every start, which says nothing a person can use.
_NOISE = (b"[Gloo] Rank ", b"Using experimental recoverable task feature")

_screen = threading.Lock()


class Pump:
    """Copies one stream of a rank, line by line, until its end.

    sink: where lines are shown, with `prefix` in front (None: nowhere). log: a file that gets the bare
    lines. `tail` holds the last 50 lines for the error record.
    """

    def __init__(self, source: IO[bytes], prefix: str, sink: BinaryIO | None, log: BinaryIO | None) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._source, self._prefix, self._sink, self._log = source, prefix.encode(), sink, log
        self._thread = threading.Thread(target=self._run, name="cyxjax-output", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float = 1.0) -> None:
        """Waits for the rest of the output; a grandchild that keeps the stream open is not waited for."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while line := self._source.readline(MAX_LINE):
            if any(noise in line for noise in _NOISE):
                continue
            self.tail.append(line.decode(errors="replace").rstrip("\n"))
            if self._log is not None:
                _write(self._log, line)
            if self._sink is not None:
                with _screen:
                    _write(self._sink, self._prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
        self._source.close()


def _write(target: BinaryIO, data: bytes) -> None:
    try:
        target.write(data)
        target.flush()
    except (OSError, ValueError):  # our reader has closed its end: the ranks must not stall for that
        return


def open_log(folder: str, rank: int, start: int) -> BinaryIO:
    """`folder`/start_0/rank_3.log, opened to append, no link followed."""
    place = os.path.join(folder, f"start_{start}")
    os.makedirs(place, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(os.path.join(place, f"rank_{rank}.log"), flags, 0o600), "wb")


def say(line: str) -> None:
    """One line of the launcher itself, on standard error."""
    with _screen:
        _write(sys.stderr.buffer, f"cyxjax.launch: {line}\n".encode())


def show(text: str) -> None:
    """`text` as it is, on standard error."""
    with _screen:
        _write(sys.stderr.buffer, text.encode())


def ranks(numbers: Iterable[int]) -> str:
    """'rank 3' or 'ranks 0-2, 5'."""
    return ranks_text(sorted(numbers))
