"""`spawn`: a group of fresh processes on this host, from within a program."""

import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from typing import Any

from cyxjax.distributed import process_group
from cyxjax.errors import EXIT_PREEMPTED, ConfigError, SpawnError
from cyxjax.launch import environment
from cyxjax.launch.failure import hooks
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.local_ranks import LocalRanks, place_to_spawn
from cyxjax.launch.output import log

GRACE_S = 2.0  # between asking the other ranks to end, after one failed, and killing them
SAVE_S = 30.0  # the same after SIGTERM or Ctrl-C, when ranks save; the default of the launcher's --grace


def spawn(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True
) -> "Spawned | None":
    """Calls `fn(rank, world_size, *args)` in `nprocs` fresh processes, which form a group in `init`.

    A function that cannot take these arguments is called as torch does, `fn(rank, *args)`; a parameter with a
    default counts, so `def fn(rank, epochs=3)` gets the world size as `epochs`.
    With RANK and WORLD_SIZE in the environment this host's ranks start at RANK, among those of other hosts.
    join: waits for all; otherwise returns a `Spawned` to `join()` later.
    Raises: SpawnError with the first failed process's traceback, after the others were stopped; ConfigError
        for a function of a notebook, which a fresh process cannot import.
    """
    _refuse_notebook(fn, nprocs)
    spawned = Spawned(fn, args, place_to_spawn(nprocs))
    if not join:
        return spawned
    spawned.join()
    return None


class Spawned:
    """Running processes; `join` waits for them."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], place: LocalRanks) -> None:
        # The server of the group, held by the parent: its port is taken before any rank starts.
        self._coordinator = Coordinator(place, log) if place.is_alone else None
        self._folder = tempfile.TemporaryDirectory(prefix="cyxjax-")
        self._processes: dict[int, Any] = {}  # by rank
        context = multiprocessing.get_context("spawn")
        try:
            if self._coordinator is not None:
                place = self._coordinator.place
                self._coordinator.open(0, self._folder.name)
            for local_rank in range(place.nproc):
                rank = place.base_rank + local_rank
                variables = place.variables(local_rank, is_hosted=place.is_alone)
                variables[records.VARIABLE] = self._error_file(rank)
                words = (fn, rank, place.world_size, args, variables)
                started: Any = context.Process(target=_run, args=words, name=f"rank {rank}")
                started.start()
                self._processes[rank] = started
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes.values()]

    def _error_file(self, rank: int) -> str:
        """The file that holds the record of a rank that failed by an exception."""
        return os.path.join(self._folder.name, f"rank_{rank}.json")

    def _record(self, rank: int, process: Any) -> ErrorRecord | None:
        """What ended `rank` abnormally, or is about to: its own record, or one made from its exit status."""
        code = process.exitcode  # first: the rank writes its record before it ends
        record = records.load(self._error_file(rank))
        return record or (records.of_status(rank, process.pid, code, Progress(), 0) if code else None)

    @property
    def _running(self) -> list[Any]:
        return [process for process in self._processes.values() if process.exitcode is None]

    def join(self, timeout: float | None = None) -> bool:
        """True once all processes have succeeded; False if some still run after `timeout` seconds.

        SIGTERM and Ctrl-C while it waits stop the processes, which have half a minute to save.
        Raises: SpawnError for the first that failed; SystemExit(143) after SIGTERM. No process is left then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with _sigterm_raises(), ExitStack() as stack:
            stack.callback(self.stop)
            try:
                while running := self._running:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        stack.pop_all()  # the processes go on
                        return False
                    self._raise_first_error()  # before the wait: a rank that ended earlier does not wake it
                    wait([process.sentinel for process in running], left)
                self._raise_first_error()
            except (KeyboardInterrupt, SystemExit):
                self._end_processes(SAVE_S)
                self._raise_first_error(stopped=True)
                raise
        return True

    def _raise_first_error(self, stopped: bool = False) -> None:
        """stopped: the ranks were asked to end; only an exception is an error then (a failed save)."""
        found = [record for rank in self._processes.items() if (record := self._record(*rank))]
        if stopped:
            found = [record for record in found if record.traceback and not record.secondary]
        if found:
            ended = [rank for rank, process in self._processes.items() if process.exitcode == 0]
            first = records.first_of(found, ended)
            raise SpawnError(
                first.rank,
                f"rank {first.rank} of the spawned processes failed: {first.traceback or first.message}\n"
                "HINT: see its traceback, or else what it printed last.",
            )

    def stop(self) -> None:
        """Ends the processes that still run, and frees the port."""
        self._end_processes(GRACE_S)
        if self._coordinator is not None:
            self._coordinator.end()
        self._folder.cleanup()

    def _end_processes(self, grace_s: float) -> None:
        """Asks running processes to end; kills those left after `grace_s`, or at a second signal to us."""
        running = self._running
        for process in running:
            process.terminate()
        limit = time.monotonic() + grace_s
        try:
            for process in running:
                process.join(max(0.0, limit - time.monotonic()))
        finally:
            for process in self._running:  # jax takes SIGTERM as a notice of preemption and continues
                process.kill()
                process.join()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, unless the program has a handler of its own."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_PREEMPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _taken(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for `fn`: (rank, world_size, *args), or torch's (rank, *args) if it cannot take these."""
    try:
        inspect.signature(fn).bind(rank, world_size, *args)
    except TypeError:
        return rank, *args
    return rank, world_size, *args


def _run(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], env: dict[str, str]
) -> None:
    """What a spawned process does."""
    environment.enter(env)
    hooks.install(rank, 0, env)
    try:
        fn(*_taken(fn, rank, world_size, args))
        process_group.finalize()  # here an error is still recorded; at exit it would only be printed
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:
        hooks.end(error)
        raise  # in a process that the rank has forked


def _refuse_notebook(fn: Callable[..., Any], nprocs: int) -> None:
    main, home = sys.modules["__main__"], getattr(fn, "__module__", None)
    unnamed = getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None
    if home == "__main__" and unnamed:
        raise ConfigError(
            "spawn was given a function of a notebook or an interactive session, which a new process "
            "cannot import. One process can train on all local devices without spawn. HINT: save it as "
            f"train.py and run `python -m cyxjax.launch --nproc-per-node {nprocs} train.py`."
        )
