"""The order in which workers take the test files."""

from pathlib import Path

from tests.support import order
from tests.support.places import TESTS


def test_each_file_of_the_table_is_there():
    names = [line.split()[0] for line in order.SECONDS.strip().splitlines()]
    paths = [(TESTS / name).with_name(f"test_{Path(name).name}.py") for name in names]
    assert [path for path in paths if not path.is_file()] == []
    assert len(set(names)) == len(names)
    assert {order._name(path) for path in paths} == set(names)


def test_long_files_begin_first_and_those_that_wait_among_those_that_compute(monkeypatch):
    monkeypatch.setattr(order, "SECONDS", "faults/a 30 1\nfaults/b 30 90\ndevice/c 80 1\ndevice/d 20 1")
    files = [Path(f"/here/tests/{name}.py") for name in ("unit/test_e", "device/test_d", "device/test_c")]
    files += [Path(f"/here/tests/faults/test_{name}.py") for name in "ab"]
    # Of files that wait: a at 0, b at 1/2. Of the others, 102 s: c at 0, d at 80/102, e (new) at 100/102.
    assert [file.stem[-1] for file in order.begin_with_the_longest(files, slow=False)] == list("cabde")
    assert [file.stem[-1] for file in order.begin_with_the_longest(files, slow=True)][-1] == "a"


def test_files_of_which_no_row_is_run_keep_their_order(monkeypatch):
    """A file with only slow tests, run without `-m slow`: pytest reports all as deselected."""
    monkeypatch.setattr(order, "SECONDS", "faults/a 0 1\nfaults/b 0 90")
    files = [Path(f"/here/tests/faults/test_{name}.py") for name in "ba"]
    assert order.begin_with_the_longest(files, slow=False) == files
