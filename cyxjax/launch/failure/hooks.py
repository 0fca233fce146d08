"""Ends a failed rank immediately and records its error, instead of waiting for peers that wait for it.

A plain exception would leave the rank in jax's shutdown barrier for five minutes, still sending heartbeats.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from cyxjax.errors import CyxjaxError
from cyxjax.launch import heartbeat
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import ErrorRecord, PeerLost

STACKS = "CYXJAX_STACK_FILE"
_installed: "Exits | None" = None


class Exits:
    """The hooks of one rank. `report` sends the peers one line: why this rank ends."""

    def __init__(self, rank: int, start: int, env: Mapping[str, str]) -> None:
        self.rank, self.start = rank, start
        self.report: Callable[[str], None] = lambda summary: None  # nobody to tell
        self.code = 0  # what sys.exit was last called with
        self.error_file = env.get(records.VARIABLE)
        self._process = os.getpid()
        self._ending = threading.Lock()
        self._lost, self._why = threading.Event(), ""

    def in_child(self) -> bool:
        """Whether this is a process that the rank forked: this object is the rank's, not its own."""
        return os.getpid() != self._process

    def die(self, error: BaseException, code: int = 0) -> NoReturn:
        """Records or shows `error`, informs the peers and ends the process. Later callers wait.

        code: as for `of_exception`.
        """
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        record = records.of_exception(
            error, rank=self.rank, progress=heartbeat.progress(), start=self.start, code=code
        )
        if record.secondary and self._lost.wait(0.5) and self._why not in record.message:
            record.message = f"{self._why}; noticed as {record.message}"
        self._show(record, error)
        if not record.secondary:
            self.report(record.summary)
        _flush()
        os._exit(record.exit_code)

    def lose(self, why: str) -> NoReturn:
        """Ends this rank because a peer was lost. Leaves a moment for the main thread's own, better error."""
        self._why = why
        self._lost.set()
        threading.Event().wait(0.2)
        self.die(PeerLost(why))

    def _show(self, record: ErrorRecord, error: BaseException) -> None:
        """Writes to a file under our launcher, which prints only the first error, last; else to stderr."""
        if self.error_file:
            with suppress(OSError):  # no room, or the launcher's folder is gone: it reads our stderr then
                records.save(record, self.error_file)
                return
        if record.secondary or isinstance(error, CyxjaxError):
            print(f"[rank {self.rank}] {record.type}: {record.message}", file=sys.stderr)
        else:
            print(record.traceback, end="", file=sys.stderr)  # the usual one, without its secrets


def install(rank: int, start: int, env: Mapping[str, str]) -> Exits:
    """Makes every uncaught exception, in any thread, end this process. Returns the hooks' state.

    A process that this one forks (a loader's worker) is no rank: it ends as it would in plain Python.
    Peers are informed only once the `report` of that state is set.

    Also registers stack dumps on SIGUSR2 into the file the launcher named.
    """
    global _installed
    exits = _installed = Exits(rank, start, env)

    def on_exception(
        kind: type[BaseException], error: BaseException, tb: TracebackType | None
    ) -> None:  # sys.excepthook
        end(error.with_traceback(tb))
        sys.__excepthook__(kind, error, tb)

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            end(args.exc_value)
        threading.__excepthook__(args)

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
    _remember_exit_code(exits)
    _dump_stacks_on_request(env)
    return exits


def end(error: BaseException, code: int = 0) -> None:
    """Ends a rank of a group or launcher as an uncaught `error` would, with a file and a line to the peers.

    Returns in any other process. code: as for `of_exception`. A main() that only returned it to
    `sys.exit(main())` would wait for its peers: that sys.exit was looked up before the group was joined, so
    it is not noted.
    """
    if _installed is not None and not _installed.in_child():
        _installed.die(error, code)


def end_if_failed(exits: Exits) -> None:
    """While the interpreter shuts down after `sys.exit(3)`: ends with 3 now, without waiting for peers."""
    if threading.main_thread().is_alive() or exits.code == 0:
        return
    exits.report(f"sys.exit({exits.code})")
    _flush()
    os._exit(exits.code)


def _remember_exit_code(exits: Exits) -> None:
    """Makes sys.exit record its exit code, since atexit handlers do not know how the process ends.

    A program that catches its own sys.exit(3) and then runs to its end is still taken to end with 3.
    """
    original = sys.exit

    def exit_with_note(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends only its thread
            exits.code = status if isinstance(status, int) else int(status is not None)
        original(status)

    sys.exit = exit_with_note


def _dump_stacks_on_request(env: Mapping[str, str]) -> None:
    """Makes SIGUSR2 write all threads' stacks, in C, so also while the GIL is held or gloo blocks."""
    if STACKS not in env:
        return
    file = open(env[STACKS], "w")  # noqa: SIM115  # stays open: the handler may not open files
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    faulthandler.enable(file=sys.stderr, all_threads=False)  # a segfault leaves its Python stack too


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed pipe or closed stream: nobody is left to read it
            stream.flush()
