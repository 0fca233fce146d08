"""Forked processes that have jax and our code loaded, which a fresh process takes seconds to import.

Python's fork server makes them, one server per pytest process; it starts no jax backend. A fork gets what a
fresh process reads at its start: environment, arguments, working folder, streams; it also ends like one.
"""

import atexit
import gc
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
    # modules that training loads with its model and its first program
    *("cyxjax.core.model.linen_models", "cyxjax.models.networks", "jaxlib.mlir.dialects.mhlo"),
    *("cyxjax.launch.backend.lowerings", "cyxjax.observe.report.page"),
    # what programs with a loop of their own and functions of the tests import
    *("cyxjax.distributed.collectives", "cyxjax.distributed.ddp", "cyxjax.models.sequential"),
    *("flax.nnx", "pytest"),
]
FRESH = (sys.executable,)  # a fresh interpreter, which may load a different version of our code
AT_START = ("JAX_", "XLA_", "NPROC")  # from the environment of each fork, not of the first test


class _Process(context.ForkServerProcess):
    """A process with the environment `variables`, by default of its creator, not of the server."""

    def __init__(self, *args: Any, variables: Mapping[str, str] = os.environ, **options: Any) -> None:
        super().__init__(*args, **options)
        self._variables = dict(variables)

    def run(self) -> None:
        enter(self._variables)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process


def server() -> context.BaseContext:
    """The running fork server."""
    forks = _Context()
    forks.set_forkserver_preload(LOADED)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(AT_START)}
    with mock.patch.dict(os.environ, kept, clear=True):
        forkserver.ensure_running()
    return forks


_STARTED: list["Program"] = []


def end_all() -> None:
    """Ends the programs that this test has started and not ended."""
    while _STARTED:
        _STARTED.pop().end()


class Program:
    """`python WORDS`, used like a subprocess.Popen that keeps output. The launcher's ranks are forks too.

    fresh: the command that runs WORDS instead, for tests about what a fork does not show: see `FRESH`.
    """

    def __init__(
        self,
        words: Sequence[object],
        env: Mapping[str, str],
        cwd: Path | None = None,
        fresh: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        self._text: tuple[str, str] | None = None
        for path in (self._out, self._err):
            path.touch()
        command = [*map(str, words)]
        arguments = (command, dict(env), str(cwd or Path.cwd()), [self._out, self._err], [*fresh])
        self._process = _Process(target=_run, args=arguments, variables=env)
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
        """Waits for the exit code. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            written = self._out.read_text() + self._err.read_text()
            raise subprocess.TimeoutExpired(f"a program that has written: {written}", timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; (stdout, stderr). Raises: subprocess.TimeoutExpired."""
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
        """Sends a signal to this process only; does nothing if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills its remaining processes and deletes its output."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, or does not yet lead a process group
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()
        self._process.join()
        self._folder.cleanup()


def run(
    words: Sequence[object], env: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` to its end."""
    return run_all([(words, env)], timeout, cwd)[0]


def run_all(
    programs: Sequence[tuple[Sequence[object], Mapping[str, str]]],
    timeout: float,
    cwd: Path | None = None,
    fresh: Sequence[str] = (),
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `python WORDS`, each with its environment, concurrently, until the last one has ended."""
    started = [Program(words, env, cwd, fresh) for words, env in programs]
    outputs = [program.communicate(timeout) for program in started]
    return [
        subprocess.CompletedProcess(list(words), program.returncode or 0, *text)
        for (words, _), program, text in zip(programs, started, outputs, strict=True)
    ]


def enter(variables: Mapping[str, str]) -> None:
    """Makes `variables` the environment, for jax too, which reads the environment when it is imported."""
    import jax

    gc.freeze()  # a collection that walks through the modules would copy their pages
    contexts.share()
    tempfile.tempdir = None  # TMPDIR of `variables`
    os.environ.clear()
    os.environ.update(variables)
    for name in variables:
        if name.startswith("JAX_"):
            text, now = variables[name], jax.config.values[name.lower()]
            value = text.lower() in ("1", "true") if isinstance(now, bool) else text
            jax.config.update(name.lower(), int(text) if type(now) is int else value)


def _run(words: list[str], env: dict[str, str], cwd: str, streams: list[Path], fresh: list[str]) -> None:
    os.setsid()
    for path, stream in zip(streams, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.chdir(cwd)
    if fresh:
        os.set_inheritable(0, True)
        os.execvpe(fresh[0], [*fresh, *words], env)
    if words[:2] == ["-m", "cyxjax.launch"]:
        forked_ranks.begin(_to_the_end)
    _to_the_end(words, env)


def _to_the_end(words: list[str], env: dict[str, str]) -> None:
    enter(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _code_of(lambda: _execute(words, str(Path.cwd())))
    threading._shutdown()  # the end of a fresh process: threads, exit handlers, streams
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
        sys.modules.pop(f"{rest[0]}.__main__", None)  # run it as if it had not been loaded
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
    """The exit code of a Python program that ends as `call` does."""
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
