"""The output of the ranks: read continuously, prefixed with the rank, and kept in one file per rank.

A reader that has stopped reading does not hold up the ranks: each of our own streams is written by a thread,
from a bounded queue. A rank writes into pipes: it gets the width of the launcher's terminal from a variable,
and marks the line that the next one replaces. The launcher draws a marked line at the bottom of the screen,
and keeps it out of the log files.
"""

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, islice
from typing import IO, BinaryIO

MAX_LINE = 65_536  # a longer line is shown in pieces, so that memory stays bounded
TAIL_LINES = 50
NAMED = 16  # of the hosts, or of the runs of ranks, in a line: some lines go to all hosts in one message
LINE_EVERY_S = 10.0  # between lines of a process that waits for others
WAITING_BYTES = 4 * 2**20  # for a reader; further lines are left out, and one line counts them
PATIENCE_S = 5.0  # how long ranks may be held up by a slow reader before it counts as stopped
LAST_WORDS_S = 2.0  # at our end, without any progress of the reader
# Messages of the libraries below jax at every start, which are of no use to a person.
_NOISE = (b"[Gloo] Rank ", b"Using experimental recoverable task feature")


class Screen:
    """One of our own streams, written by a thread of its own; `put` never waits longer than its limit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        lock = threading.RLock()
        self._added, self._written = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[bytes] = deque()
        self._bytes, self._left_out = 0, 0  # bytes not yet written; lines to report as left out
        self._live = False  # a line that the next one replaces is at the bottom
        threading.Thread(target=self._run, name="cyxjax-screen", daemon=True).start()

    def put(self, data: bytes, patience_s: float = 0.0) -> None:
        """Shows `data` in its turn; leaves it out when there is no room for it within `patience_s`."""
        with self._written:
            if not self._left_out:  # a reader that has stopped is waited for once
                self._written.wait_for(lambda: self._has_room(data), patience_s)
            if not self._has_room(data):
                self._left_out += data.count(b"\n") or 1
                return
            erased = b"\r" + CLEAR_TO_END.encode() if self._live else b""
            self._live = False
            self._add(erased + data)

    def put_live(self, text: bytes) -> None:
        """Shows `text` at the bottom, in place of the last live line; not while other lines are waiting."""
        with self._written:
            if not self._bytes:
                self._add(b"\r" + text + CLEAR_TO_END.encode())
                self._live = bool(text)

    def flush(self, patience_s: float) -> None:
        """Waits until all is shown, as long as the reader takes something every `patience_s`."""
        with self._written:
            while self._bytes and self._written.wait(patience_s):
                pass

    def _has_room(self, data: bytes) -> bool:
        return not self._bytes or self._bytes + len(data) <= WAITING_BYTES

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._bytes += len(data)
        self._added.notify()

    def _run(self) -> None:
        while True:
            with self._added:
                self._added.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            while data:
                written = self._write(data)
                data = data[written:]
                with self._written:
                    self._bytes -= written
                    self._say_what_was_left_out()
                    if written:  # the reader makes progress
                        self._written.notify_all()

    def _say_what_was_left_out(self) -> None:
        if self._left_out and self._bytes < WAITING_BYTES // 2:
            note = f"{self._left_out} lines are not shown here: the reader of this output stopped reading"
            self._add(f"cyxjax.launch: {note} (--log-dir keeps every line)\n".encode())
            self._left_out = 0

    def _write(self, data: bytes) -> int:
        """Writes the beginning of `data`; returns how many bytes are done with."""
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # somebody has made the pipe a non-blocking one
            select.select([], [self._descriptor], [])
            return 0
        except OSError:  # our reader has closed its end, or the disk is full: the ranks must not stall
            return len(data)


_screens: dict[tuple[int, int], Screen] = {}
_making = threading.Lock()


def screen(stream: IO[str] | None) -> Screen | None:
    """The screen of sys.stdout or sys.stderr, one for both where they are one file; None for a closed one."""
    try:
        assert stream is not None
        descriptor = stream.fileno()
        where = os.fstat(descriptor)
    except (AssertionError, OSError, ValueError):
        return None
    with _making:
        key = (where.st_dev, where.st_ino)
        if key not in _screens:
            # A descriptor of its own: the file stays the one of this key when the stream is closed.
            with suppress(OSError):  # no descriptor is left, which may be the error to show
                descriptor = os.dup(descriptor)
            _screens[key] = Screen(descriptor)
        return _screens[key]


def flush(patience_s: float = LAST_WORDS_S) -> None:
    """Waits until all output is shown, unless its reader has stopped."""
    for there in list(_screens.values()):
        there.flush(patience_s)


class Pump:
    """Copies one stream of a rank, line by line, until its end.

    sink: where lines are shown, with `prefix` in front (None: nowhere). log: a file that gets the bare
    lines. `tail` holds the last 50 lines for the error record.
    """

    def __init__(self, source: IO[bytes], prefix: str, sink: Screen | None, log: BinaryIO | None) -> None:
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
            if (live := marked(line)) is not None:
                if self._sink is not None:
                    self._sink.put_live(self._prefix + live if live else b"")
                continue
            self.tail.append(line.decode(errors="replace").rstrip("\n"))
            if self._log is not None:
                with suppress(OSError, ValueError):  # a full disk, or closed after the rank's end
                    self._log.write(line)
                    self._log.flush()
            if self._sink is not None:
                end = b"" if line.endswith(b"\n") else b"\n"
                self._sink.put(self._prefix + line + end, PATIENCE_S)
        self._source.close()


def open_log(folder: str, rank: int, start: int) -> BinaryIO:
    """`folder`/start_0/rank_3.log, opened to append, no link followed."""
    place = os.path.join(folder, f"start_{start}")
    os.makedirs(place, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(os.path.join(place, f"rank_{rank}.log"), flags, 0o600), "wb")


def say(line: str) -> None:
    """One line of the launcher itself, on standard error. Control characters are shown as escapes."""
    show("cyxjax.launch: " + printable(line, MAX_LINE, keep="\n\t") + "\n")


def log(line: str) -> None:
    """One line of a rank on standard error, marked as ours."""
    print(f"cyxjax: {printable(line, MAX_LINE)}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """`text` as it is, on standard error."""
    if (there := screen(sys.stderr)) is not None:
        there.put(text.encode(errors="backslashreplace"))


def printable(text: object, limit: int = 2000, keep: str = "") -> str:
    """`text` of another process as one harmless line: control characters are shown as their escapes.

    keep: control characters that are left as they are.
    """
    cut = str(text)[:limit]
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in cut)


def ranks_text(ranks: Iterable[int]) -> str:
    """'rank 3', or 'ranks 0-2, 5'; of more than NAMED runs of numbers the first ones."""
    numbers = sorted(ranks)
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    more = ", ..." if len(runs) > NAMED else ""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(texts[:NAMED]) + more


def disagreement(
    what: str,
    values: Mapping[int, object],
    hint: str = "start every rank with the same program and environment",
) -> str:
    """'ranks differ in jax: 0.10.2 on ranks 0, 1; 0.10.3 on rank 2', with a hint.

    values: by rank; of more than NAMED different ones the first are named.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(str(value), []).append(rank)
    shown = [f"{value} on {ranks_text(ranks)}" for value, ranks in islice(holders.items(), NAMED)]
    more = "; ..." if len(holders) > NAMED else ""
    return f"ranks differ in {what}: {'; '.join(shown)}{more}. HINT: {hint}."


def unequal_facts(facts: Mapping[int, Mapping[str, object]], **hint: str) -> Iterator[str]:
    """A `disagreement` for each fact that is not equal on all ranks. facts: by rank, each by name."""
    for name in dict.fromkeys(name for held in facts.values() for name in held):
        values = {rank: str(held.get(name, "(none)")) for rank, held in facts.items()}
        if len(set(values.values())) > 1:
            yield disagreement(name, values, **hint)


CLEAR_TO_END = "\x1b[K"
_COLUMNS = "CYXJAX_TERMINAL_COLUMNS"
_MARK = b"\x1b_cyxjax-live\x1b\\"  # an application command of ECMA-48, which terminals do not show


def variables(prefix: str, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with the width of a rank's lines after `prefix`; empty where there is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty() or env.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return {}
    return {_COLUMNS: str(os.get_terminal_size(sys.stdout.fileno()).columns - len(prefix))}


def relayed_columns() -> int | None:
    """The width of the launcher's terminal for this rank; None where no launcher shows a terminal."""
    columns = os.environ.get(_COLUMNS, "")
    return int(columns) if columns.isdigit() else None


def live_line(text: str, *, relayed: bool) -> str:
    """`text` as the line at the bottom of a terminal, which the next one replaces."""
    return f"{_MARK.decode()}{text}\n" if relayed else f"\r{text}{CLEAR_TO_END}"


def marked(line: bytes) -> bytes | None:
    """The text of a line that a rank has marked as live; None for any other line."""
    return line[len(_MARK) :].rstrip(b"\n") if line.startswith(_MARK) else None
