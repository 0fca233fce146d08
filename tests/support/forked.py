"""Processes that begin with jax and our code loaded: forked, where a fresh one would import them for seconds.

Python's own fork server makes them, one for each pytest process; it starts no jax backend. A fork is given
what a fresh process reads at its start: environment, arguments, folder, streams; it ends as one does, too.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import context, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import contexts, forked_ranks
from tests.support.waiting import until

LOADED = [
    *("cyxjax.train.experiment", "cyxjax.distributed", "cyxjax.launch.__main__"),
    *("cyxjax.launch.supervise.supervisor", "flax.linen", "optax"),
    # what a training loads with its model and its first program
    *("cyxjax.core.model.linen_models", "cyxjax.models.networks", "jaxlib.mlir.dialects.mhlo"),
]
AT_START = ("JAX_", "XLA_", "NPROC")  # a fork's own count, not those of the test that came first


class _Process(context.ForkServerProcess):
    """A process with the environment in which it was made, not the server's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._variables = dict(os.environ)

    def run(self) -> None:
        enter(self._variables)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def server() -> context.BaseContext:
    """What makes forks, running."""
    forks = _Context()
    forks.set_forkserver_preload(LOADED)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(AT_START)}
    with mock.patch.dict(os.environ, kept, clear=True):
        forkserver.ensure_running()
    return forks


_STARTED: list["Program"] = []


def end_all() -> None:
    """Ends what this test has started and did not end."""
    while _STARTED:
        _STARTED.pop().end()


class Program:
    """`python WORDS`, as subprocess.Popen with its output kept. The ranks of our launcher are forks too."""

    def __init__(self, words: Sequence[object], env: Mapping[str, str], cwd: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        self._text: tuple[str, str] | None = None
        for path in (self._out, self._err):
            path.touch()
        given = ([str(word) for word in words], dict(env), str(cwd or Path.cwd()), [self._out, self._err])
        self._process = _Process(target=_run, args=given)
        server()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        _STARTED.append(self)

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed, when it has ended. Raises: subprocess.TimeoutExpired."""
        self.wait(timeout)
        if self._text is None:
            self._text = self._out.read_text(), self._err.read_text()
            self._folder.cleanup()
        return self._text

    def hears(self, text: str, seconds: float = 90) -> bool:
        """True once it has printed `text`."""
        return until(lambda: text in self._out.read_text(), seconds)

    def complains(self, text: str, seconds: float = 90) -> bool:
        """True once `text` is on its standard error."""
        return until(lambda: text in self._err.read_text(), seconds)

    def send_signal(self, number: int) -> None:
        """Sends it to this process alone; nothing if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills what still runs of it, and forgets what it printed."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now, or leads no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()
        self._process.join()
        self._folder.cleanup()


def run(
    words: Sequence[object], env: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` to its end."""
    return run_all([(words, env)], timeout, cwd)[0]


def run_all(
    programs: Sequence[tuple[Sequence[object], Mapping[str, str]]], timeout: float, cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """`python WORDS` with its environment, for all at once, to the end of the last."""
    started = [Program(words, env, cwd) for words, env in programs]
    said = [program.communicate(timeout) for program in started]
    return [
        subprocess.CompletedProcess(list(words), program.returncode or 0, *text)
        for (words, _), program, text in zip(programs, started, said, strict=True)
    ]


def run_fresh(
    programs: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    timeout: float,
    cwd: Path,
    interpreter: str = sys.executable,
) -> list[subprocess.CompletedProcess[str]]:
    """As `run_all`, but each by an interpreter of its own, which may load other code than ours."""
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": cwd}
    started = [subprocess.Popen([interpreter, *words], env=env, **out) for words, env in programs]
    try:
        said = [process.communicate(timeout=timeout) for process in started]
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *text)
            for process, text in zip(started, said, strict=True)
        ]
    finally:
        for process in started:
            process.kill()
            process.wait()


def enter(variables: Mapping[str, str]) -> None:
    """Makes `variables` the environment, for jax too, which has read its own when it was loaded."""
    import jax

    contexts.share()
    os.environ.clear()
    os.environ.update(variables)
    for name in variables:
        if name.startswith("JAX_"):
            text, now = variables[name], jax.config.values[name.lower()]
            value = text.lower() in ("1", "true") if isinstance(now, bool) else text
            jax.config.update(name.lower(), int(text) if type(now) is int else value)


def _run(words: list[str], env: dict[str, str], cwd: str, said: list[Path]) -> None:
    os.setsid()
    for path, stream in zip(said, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.chdir(cwd)
    if words[:2] == ["-m", "cyxjax.launch"]:
        forked_ranks.begin(_to_the_end)
    _to_the_end(words, env)


def _to_the_end(words: list[str], env: dict[str, str]) -> None:
    enter(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _code_of(lambda: _execute(words, str(Path.cwd())))
    threading._shutdown()  # as a fresh process ends: its threads, what it registered, its streams
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(words: list[str], cwd: str) -> None:
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    first, *rest = words
    if first == "-m":
        sys.path.insert(0, cwd)
        sys.argv = rest
        sys.modules.pop(f"{rest[0]}.__main__", None)  # it is run as if it had not been loaded
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def _code_of(call: Callable[[], None]) -> int:
    """The exit code that Python gives a program that ends as `call` does."""
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0
