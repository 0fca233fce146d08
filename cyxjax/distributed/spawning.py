"""`spawn`: a group of fresh processes on this host, from within a program."""

import inspect
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, SpawnError
from cyxjax.launch import environment
from cyxjax.launch.group.client import log
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.local_ranks import LocalRanks, place_to_spawn

GRACE_S = 2.0  # between asking the other ranks to end and ending them


def spawn(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True
) -> "Spawned | None":
    """Calls `fn(rank, world_size, *args)` in `nprocs` fresh processes, which form a group in `init`.

    A function that takes one argument less is called as torch does, `fn(rank, *args)`.
    With RANK and WORLD_SIZE in the environment this host's ranks start there, among those of other hosts.
    join: waits for all; otherwise returns a `Spawned` to `join()` later.
    Raises: SpawnError with the first failed process's traceback, after the others were stopped; ConfigError
        for a function of a notebook, which a fresh process cannot import.
    """
    _refuse_notebook(fn, nprocs)
    spawned = Spawned(_in_our_order(fn, args), args, place_to_spawn(nprocs))
    if not join:
        return spawned
    spawned.join()
    return None


class Spawned:
    """Processes that run; `join` waits for them."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], place: LocalRanks) -> None:
        # The server of the group, held by the parent: its port is taken before any rank starts.
        self._coordinator = Coordinator(place, log) if place.is_alone else None
        self._folder = tempfile.TemporaryDirectory(prefix="cyxjax-")
        if self._coordinator is not None:
            place = self._coordinator.place
            self._coordinator.open(0, self._folder.name)
        self._ends: dict[int, tuple[Any, Connection]] = {}  # rank -> process, where its error comes out
        context = multiprocessing.get_context("spawn")
        try:
            for local_rank in range(place.nproc):
                ours, theirs = context.Pipe(duplex=False)
                rank = place.base_rank + local_rank
                variables = place.variables(local_rank, is_hosted=place.is_alone)
                words = (fn, rank, place.world_size, args, variables, theirs)
                started: Any = context.Process(target=_run, args=words, name=f"rank {rank}")
                started.start()
                theirs.close()
                self._ends[rank] = started, ours
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process, _ in self._ends.values()]

    def join(self, timeout: float | None = None) -> bool:
        """True once all processes have ended well; False if some still run after `timeout` seconds.

        Raises: SpawnError for the first that failed; all are gone then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while running := [process for process, _ in self._ends.values() if process.exitcode is None]:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._raise_first_error()  # before the wait: one that has ended already wakes no wait
                wait([process.sentinel for process in running], left)
        except BaseException:
            self.stop()
            raise
        self._raise_first_error()
        self.stop()
        return True

    def _raise_first_error(self) -> None:
        failed = {rank: p.exitcode for rank, (p, _) in self._ends.items() if p.exitcode}
        errors = {rank: _traceback_of(self._ends[rank][1]) for rank in failed}
        # A rank that sent a traceback comes before one that ended because a peer was lost.
        for rank in sorted(failed, key=lambda r: not errors[r]):
            raise SpawnError(
                rank,
                f"rank {rank} of the spawned processes ended with exit code {failed[rank]}. {errors[rank]}\n"
                "HINT: see its traceback, or else what it printed last; -9 is often for want of memory.",
            )

    def stop(self) -> None:
        """Ends what still runs, and frees the port."""
        running = [process for process, _ in self._ends.values() if process.exitcode is None]
        for process in running:
            process.terminate()
        limit = time.monotonic() + GRACE_S
        for process in running:
            process.join(max(0.0, limit - time.monotonic()))
            if process.exitcode is None:  # jax takes SIGTERM for a notice of preemption and goes on
                process.kill()
                process.join()
        for _, pipe in self._ends.values():
            pipe.close()
        if self._coordinator is not None:
            self._coordinator.end()
        self._folder.cleanup()


def _in_our_order(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """`fn` as `fn(rank, world_size, *args)`; one whose own arguments have no room for both is torch's."""
    try:
        inspect.signature(fn).bind(0, 1, *args)
    except TypeError:
        return partial(_as_torch, fn)
    return fn


def _as_torch(fn: Callable[..., Any], rank: int, world_size: int, *args: Any) -> Any:
    return fn(rank, *args)


def _run(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], env: dict[str, str], pipe: Any
) -> None:
    """What a spawned process does."""
    environment.enter(env)
    try:
        fn(rank, world_size, *args)
        process_group.finalize()  # together: multiprocessing ends a process without its exit handlers
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception:
        pipe.send_bytes(traceback.format_exc().encode())
        sys.exit(1)


def _traceback_of(pipe: Connection) -> str:
    try:
        return pipe.recv_bytes().decode() if not pipe.closed and pipe.poll() else ""
    except EOFError:  # it ended before it could say anything
        return ""


def _refuse_notebook(fn: Callable[..., Any], nprocs: int) -> None:
    main, home = sys.modules["__main__"], getattr(fn, "__module__", None)
    unnamed = getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None
    if home == "__main__" and unnamed:
        raise ConfigError(
            "spawn was given a function of a notebook or an interactive session, which a fresh process "
            "cannot import. One process over all local devices trains here as well. HINT: save it as "
            f"train.py and run `python -m cyxjax.launch --nproc-per-node {nprocs} train.py`."
        )
