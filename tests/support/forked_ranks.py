"""Ranks that our launcher forks where it is a fork itself (forked.py): they need not import anything again.

The launcher has threads and must not fork, so a helper that is forked before the launcher begins does it. The
first parent of a rank ends immediately, so that the launcher, the nearest subreaper, becomes its parent, as
if it had started the rank: it waits for the rank, which ends with it. A rank is found by its process name,
since its environment in /proc is the helper's. All else is real: session, streams, signals, exit code.
"""

import ctypes
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from tests.support.waiting import until

SET_PDEATHSIG, SET_NAME, SET_CHILD_SUBREAPER = 1, 15, 36  # of prctl
_UNBUFFERED = [sys.executable, "-u"]  # how the launcher's command for a Python program begins


def name_of(run_id: str) -> str:
    """The name of the ranks of a run in /proc/PID/comm, which holds 15 characters."""
    return f"cy-{run_id[-12:]}"


def begin(execute: Callable[[list[str], dict[str, str]], None]) -> None:
    """From now on `cyxjax.launch`, in this process, forks ranks that `execute(words, environment)`."""
    from cyxjax.launch.supervise import processes

    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    ours, helpers = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _help(helpers, execute)
    helpers.close()
    real = processes.start

    def start(command: list[str], env: dict[str, str]) -> Any:
        is_python = command[:2] == _UNBUFFERED
        return _Rank(ours, command[2:], env) if is_python else real(command, env)

    processes.start = start


class _Rank:
    """The part of subprocess.Popen that the launcher uses, for a rank that the helper has forked."""

    def __init__(self, helper: socket.socket, words: list[str], env: dict[str, str]) -> None:
        pipes = [os.pipe() for _ in range(2)]
        order = json.dumps([words, env, os.getpid()]).encode()
        socket.send_fds(helper, [len(order).to_bytes(8, "big")], [write for _, write in pipes])
        helper.sendall(order)
        for _, write in pipes:
            os.close(write)
        self.stdout, self.stderr = (open(read, "rb") for read, _ in pipes)  # noqa: SIM115
        self.pid = int.from_bytes(_receive(helper, 8), "big")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _receive(sender: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sender.recv(size - len(data))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return data


def _help(launcher: socket.socket, execute: Callable[[list[str], dict[str, str]], None]) -> None:
    """Forks a rank for each request until the launcher has ended; then ends this process."""
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # as the launcher's tether does, until the rank handles them
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    while True:
        head, streams, _, _ = socket.recv_fds(launcher, 8, 2)
        if not head:
            os._exit(0)
        order = _receive(launcher, int.from_bytes(head, "big"))
        read, write = os.pipe()
        parent = os.fork()
        if parent == 0:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(write, os.getpid().to_bytes(8, "big"))
            for number in (read, write, launcher.fileno()):
                os.close(number)
            _become(streams, *json.loads(order), execute)
        os.close(write)
        pid = os.read(read, 8)
        os.waitpid(parent, 0)  # only now is the rank the launcher's child
        launcher.sendall(pid)
        for number in (read, *streams):
            os.close(number)


def _become(
    streams: list[int],
    words: list[str],
    env: dict[str, str],
    launcher: int,
    execute: Callable[[list[str], dict[str, str]], None],
) -> None:
    """Does what the launcher's tether and a fresh interpreter do for a rank; ends the process."""
    if not until(lambda: os.getppid() == launcher, 10):
        os._exit(1)
    libc = ctypes.CDLL(None)
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(SET_NAME, name_of(env["CYXJAX_RUN_ID"]).encode())
    if os.getppid() != launcher:
        os._exit(1)
    for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
        os.dup2(stream, number)
        os.close(stream)
    out, err = (io.FileIO(number, "w", closefd=False) for number in (1, 2))
    sys.stdout = io.TextIOWrapper(out, "utf-8", write_through=True)  # type: ignore[type-var]
    sys.stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)  # type: ignore[type-var]
    execute(words, env)
