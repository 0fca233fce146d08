"""Memory pages: what a launcher sets, what a process sets itself, and that user settings are kept."""

import os
import subprocess
import sys

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch.backend import pages
from tests.support.launching import launch

CPU = {"JAX_PLATFORMS": "cpu"}
HOST = "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n"
CACHE = "anon 150\nfile 850\ninactive_file 800\n"  # of files that were read, freed when memory is needed
KEPT = {"MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """8 GB of memory are available."""
    monkeypatch.setattr(pages, "available_bytes", lambda: 8 * 10**9)


def test_the_default_needs_two_gigabytes_for_each_process_and_no_gpu(monkeypatch):
    assert [pages.chosen(CPU, number) for number in (1, 4, 5)] == [pages.DEFAULT, pages.DEFAULT, "off"]
    monkeypatch.setattr(pages, "visible_gpus", lambda env: ["0"])
    found = [pages.chosen(env, 1) for env in ({}, CPU, {"DISTRIBUTED_BACKEND": "gloo"})]
    assert found == ["off", pages.DEFAULT, pages.DEFAULT]
    with pytest.raises(ConfigError, match=pages.VARIABLE):
        pages.chosen({pages.VARIABLE: "large"}, 1)


@pytest.mark.parametrize(
    ("word", "own", "added"),
    [
        ("off", {}, {}),
        ("kept", {}, dict.fromkeys(KEPT)),
        ("huge", {}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        (
            "huge+kept",
            {"MALLOC_ARENA_MAX": "3", "GLIBC_TUNABLES": "glibc.malloc.check=1"},
            dict.fromkeys(KEPT - {"MALLOC_ARENA_MAX"})
            | {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"},
        ),
        ("huge", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, {}),
    ],
)
def test_the_user_has_the_last_word(word, own, added):
    found = pages.variables(CPU | own | {pages.VARIABLE: word}, 1)
    assert {name: value if added.get(name) else None for name, value in found.items()} == added


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        ({}, 0),
        ({"proc/meminfo": HOST}, 4_096_000),
        ({"proc/meminfo": HOST, "sys/fs/cgroup/memory.max": "max\n"}, 4_096_000),
        ({"proc/meminfo": HOST, "sys/fs/cgroup/memory.max": "3000\n"}, 2800),
    ],
)
def test_the_memory_of_a_control_group_counts(tmp_path, monkeypatch, files, num_bytes):
    monkeypatch.undo()
    files |= {"sys/fs/cgroup/memory.current": "1000\n", "sys/fs/cgroup/memory.stat": CACHE}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert pages.available_bytes(tmp_path) == num_bytes


def test_a_kernel_without_huge_pages_is_said_with_the_remedy(tmp_path):
    kernel = tmp_path / "enabled"
    kernel.write_text("always [madvise] never\n")
    wanted = CPU | {pages.VARIABLE: "huge"}
    assert pages.refused_by_kernel(wanted, kernel) == ""
    kernel.write_text("always madvise [never]\n")
    assert str(kernel) in pages.refused_by_kernel(wanted, kernel)
    assert pages.refused_by_kernel(CPU | {pages.VARIABLE: "kept"}, kernel) == ""


# Page faults for 64 MB that were freed before, and whether the kernel reports huge pages as disabled.
PROGRAM = """
import ctypes, resource, sys
from cyxjax.launch.backend import pages
for word in sys.argv[1:]:
    pages.use(word)
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(64_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touch()
print(touch(), ctypes.CDLL(None).prctl(42, 0, 0, 0, 0))
"""


def touched(*words, **env):
    """(page faults of 64 MB, whether huge pages are disabled) in a process with the arguments `words`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | CPU | env
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True, timeout=60)
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")
def test_a_process_keeps_its_pages_and_off_takes_that_back():
    assert touched("auto", CYXJAX_PAGES="off")[0] > 10_000  # 15,600 pages of 4 kB
    assert touched("auto", CYXJAX_PAGES="kept")[0] < 1_000
    kept = pages.variables(CPU | {pages.VARIABLE: "kept"}, 1)
    assert touched("auto", CYXJAX_PAGES="off", **kept)[0] < 1_000  # as the user, or a launcher, has set it
    faults, disabled = touched("auto", "off", CYXJAX_PAGES="kept", **kept)
    assert faults > 10_000
    assert disabled == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize(("flags", "wanted"), [((), KEPT | {"GLIBC_TUNABLES"}), (("--pages", "off"), set())])
def test_the_launcher_sets_them_for_its_ranks(tmp_path, flags, wanted, monkeypatch):
    for name in (*KEPT, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "rank.py"
    script.write_text("import os; print([n for n in os.environ if n.startswith(('MALLOC_', 'GLIBC_'))])")
    run = launch(tmp_path, 1, *flags, script=script, fork=True, CYXJAX_PAGES="huge+kept")
    assert set(eval(run.out)) == wanted, run.err
