"""Every planted fault still applies to the code as it is, and names a test that is there to catch it.

`python scripts/mutants.py` plants them, one at a time, and runs those tests: minutes, so not here.
"""

import pytest

from tests.support.places import ROOT, module_of
from tests.support.programs import fresh, run

mutants = module_of(ROOT / "scripts" / "mutants.py")
TABLE = mutants.read_table()


@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: f"{m.file}: {m.name}")
def test_a_planted_fault_applies_and_names_its_test(mutant):
    assert mutants.problem(mutant) == ""


def test_every_row_that_must_catch_a_fault_is_collected():
    rows = {mutant.caught_by for mutant in TABLE}
    done = run("-m", "pytest", "-q", "-n", 0, "-p", "no:cacheprovider", "--collect-only", *rows, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr  # pytest refuses an id that it does not know


def test_the_packages_where_a_fault_is_silent_have_their_share():
    found = [m.file.split("/")[0] for m in TABLE]
    assert {
        package: found.count(package) >= 12 for package in ("core", "sync", "data", "checkpoint")
    } == dict.fromkeys(("core", "sync", "data", "checkpoint"), True)
    assert len({m.name for m in TABLE}) == len(TABLE) >= 50


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"find": "no such text"}, "occurs 0 times"),
        ({"put": "("}, "is not valid Python"),
        ({"caught_by": "tests/no_such.py::test_x"}, "there is no test"),
    ],
)
def test_what_cannot_be_tried_is_named(change, problem):
    assert problem in mutants.problem(TABLE[0]._replace(**change))


def test_the_copy_has_every_file_of_the_package_and_no_results_of_runs(tmp_path):
    root = tmp_path / "root"
    for name in ("cyxjax/train/runs/audit.py", "runs/a/history.json", ".git/config", "tests/conftest.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    copy = mutants.copied(root, tmp_path / "copy")
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert found == {"cyxjax/train/runs/audit.py", "tests/conftest.py"}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_fault_is_caught_and_a_survivor_is_seen(tmp_path):
    # A package of one function, a test that sees that it adds, and one that sees nothing.
    files = {
        "cyxjax/__init__.py": "",
        "cyxjax/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/test_sums.py": "from cyxjax.sums import add\n"
        "def test_adds():\n    assert add(1, 2) == 3\n"
        "def test_sees_nothing():\n    assert add(0, 0) == 0\n",
        "tests/house/mutants/sums.toml": "".join(
            f"[[mutant]]\nname = '{name}'\nfile = 'sums.py'\nfind = 'a + b'\nput = '{put}'\n"
            f"caught_by = 'tests/test_sums.py::{test}'\n"
            for name, put, test in [
                ("seen", "a - b", "test_adds"),
                ("unseen", "a - b", "test_sees_nothing"),
                ("no import", "a + b\\nraise ImportError", "test_adds"),
            ]
        ).replace("put = 'a + b\\nraise ImportError'", 'put = "a + b\\nraise ImportError"'),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = fresh(ROOT / "scripts" / "mutants.py", "--root", tmp_path)
    said = [line.split(" s  ")[-1].split()[0] for line in done.stdout.splitlines() if " s  " in line]
    assert (done.returncode, said) == (1, ["the", "caught", "SURVIVED", "BROKEN,"]), done.stdout + done.stderr
    assert (tmp_path / "cyxjax" / "sums.py").read_text() == files["cyxjax/sums.py"]  # a copy was changed
