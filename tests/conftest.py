"""Setup for all tests: strict dtype and rank promotion, and eight virtual CPU devices."""

import functools
import gc
import multiprocessing.util
import os
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

# A shell that runs the tests in the background ignores SIGINT for them, and the launcher would respect that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup, likewise
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Before jax is imported: eight devices in one process need a pool of eight threads, or their
# collectives starve one another (XLA sizes the pool by NPROC).
os.environ.setdefault("NPROC", "8")
# Tests compile far more than they compute: skip LLVM's costly passes, in child processes too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Also do not split programs or emit fusions through MLIR, which takes a third of the time to compile, nor
# use vectors of more than 128 bits, which takes a tenth of the rest.
# XLA aborts on a flag that it does not know, so only versions that we have tried get these flags.
# To compile as users do: XLA_FLAGS= pytest ...
if version("jaxlib").startswith("0.10."):
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_cpu_prefer_vector_width=128",
    )

# Most tests compile a program that another test has compiled: a cache keeps them, for child processes too.
# It is not jax's own cache, where a process that reads while another one writes would find half a file.
os.environ["CYXJAX_COMPILE_CACHE"] = os.environ.pop(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache")
)

# Some tests measure memory, so the test process must not hold on to memory that a test has freed.
os.environ["CYXJAX_PAGES"] = "off"

import pytest

from tests.support import leaks, order

MEMORY, ROOM_BYTES = "/dev/shm", 2 << 30


def prepare() -> None:
    """Loads jax and our code, and sets what holds for all tests of this process."""
    import jax
    from hypothesis import settings
    from jax._src import compilation_cache

    from cyxjax.data import catalog
    from cyxjax.launch.backend import programs
    from tests.support import contexts, shared_programs

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    programs.keep()
    # Where jax compresses what is kept with zlib, it only wraps it: 2 ms less for each of 3,800 programs.
    compilation_cache.zlib = SimpleNamespace(
        compress=functools.partial(zlib.compress, level=0), decompress=zlib.decompress
    )
    catalog._digits = functools.cache(catalog._digits)  # each reading parses 120,000 numbers
    contexts.share()
    shared_programs.share()
    settings.register_profile("any_machine", deadline=None)  # 200 ms per example: too short on a busy machine
    settings.load_profile("any_machine")
    # Tracing makes many objects and few cycles: a collection every 700 objects took a tenth of the time.
    gc.set_threshold(100_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    """Prepares a process that runs tests; xdist's controller runs none, and starts the others 2 s earlier.

    Puts `tmp_path` in memory if there is room: saved files are synced, which is slow on a disk.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        prepare()
    if Path(MEMORY).is_dir():
        found = os.statvfs(MEMORY)
        may_execute = not found.f_flag & os.ST_NOEXEC  # some tests write a program
        if may_execute and found.f_bavail * found.f_frsize > ROOM_BYTES:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_collection_finish() -> None:
    gc.freeze()  # imported modules are no garbage: the collector can skip them


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects ten times at its end, after the last test has been reported


@pytest.hookimpl(trylast=True)  # after tests have been deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first, so that none is left for the end, when other workers have nothing to do.

    Raises: UsageError for a name with an address in it: it differs between workers, which then run nothing.
    """
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{named[0][:120]}...: an address is no name. HINT: ids=[...].")
    slow = all(item.get_closest_marker("slow") for item in items)
    files = order.begin_with_the_longest(dict.fromkeys(item.path for item in items), slow)
    places = {file: place for place, file in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True, scope="session")
def temporary_folder() -> Iterator[None]:
    """Removes what this process and its children leave in the folder for temporary files."""
    multiprocessing.util.get_temp_dir()  # outside of it: multiprocessing removes it after the tests
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tmp_path`, as the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function: calls a command's `main` with words, checks the exit code, returns what was printed."""

    def run(main: Callable[[list[str]], int], *words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture(autouse=True, scope="module")
def no_module_leaks() -> Iterator[None]:
    """Checks that module-scoped fixtures leave nothing behind either."""
    yield from _leaves_nothing()


@pytest.fixture(autouse=True)
def no_test_leaks(no_module_leaks: None) -> Iterator[None]:
    """Checks that no variable, thread, process, file or group is left for the next test to find."""
    yield from _leaves_nothing()


@pytest.fixture(autouse=True)
def forked_programs_end(no_test_leaks: None) -> Iterator[None]:
    """Ends the forked programs of a failed test: they are no children of this process and would go on."""
    from tests.support import forked

    yield
    forked.end_all()


def _leaves_nothing() -> Iterator[None]:
    before = leaks.traces()
    yield
    left = leaks.left_since(before)
    assert not left, "; ".join(left)


@pytest.fixture
def group() -> Iterator[None]:
    """For a test that creates a process group, or whose trainer does: ends the group after the test, and
    restores the environment variables that `init` set for jax and for child processes."""
    from cyxjax.distributed import process_group

    before = dict(os.environ)
    yield
    process_group.finalize()
    # Restore only what differs: XLA threads may read variables meanwhile, which the C library forbids.
    for name in os.environ.keys() | before.keys():
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]
