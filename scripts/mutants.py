"""Plants faults in a copy of cyxjax, one at a time, and shows that a named test catches each.

    python scripts/mutants.py                 all of tests/house/mutants/*.toml: several seconds each
    python scripts/mutants.py --only zero1    those with this word in their file or name
    python scripts/mutants.py --check         every fault still applies and names a test that exists

Exit code 1 if a fault survives, or if a test fails without a fault. The working tree is never changed.
"""

import argparse
import ast
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TABLES = Path("tests/house/mutants")
_IGNORED = shutil.ignore_patterns(".*", "__pycache__", "notebooks")
_RESULTS = {"runs", "build", "dist"}  # in the root alone; cyxjax/train/runs is a package
_LIMIT_S = 600  # per mutant; a test that hangs is killed, and the mutant counts as BROKEN


class Mutant(NamedTuple):
    """One fault: `put` replaces `find` in cyxjax/`file`, and the test `caught_by` must fail."""

    name: str
    file: str
    find: str
    put: str
    caught_by: str

    @property
    def path(self) -> Path:
        return Path("cyxjax", self.file)

    def applied(self, text: str) -> str:
        return text.replace(self.find, self.put)


def read_table(root: Path = ROOT) -> list[Mutant]:
    """All mutants, in the order of their files. Raises: TypeError for an unknown or a missing field."""
    tables = [tomllib.loads(path.read_text()) for path in sorted((root / TABLES).glob("*.toml"))]
    return [Mutant(**fields) for table in tables for fields in table["mutant"]]


def problem(mutant: Mutant, root: Path = ROOT) -> str:
    """The reason why this mutant cannot be tried, or ""."""
    text = (root / mutant.path).read_text()
    if text.count(mutant.find) != 1:
        return f"its text occurs {text.count(mutant.find)} times in {mutant.path}; expected once"
    try:
        ast.parse(mutant.applied(text))
    except SyntaxError as error:
        return f"is not valid Python: {error}"
    file, _, function = mutant.caught_by.partition("::")
    tests = ast.walk(ast.parse((root / file).read_text())) if (root / file).exists() else ()
    names = {node.name for node in tests if isinstance(node, ast.FunctionDef)}
    return "" if function.partition("[")[0] in names else f"there is no test {mutant.caught_by}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="mutants with this word in their file or name")
    parser.add_argument("--check", action="store_true", help="check the mutants without running a test")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the repository")
    args = parser.parse_args(argv)
    mutants = [m for m in read_table(args.root) if args.only in m.file or args.only in m.name]
    wrong = [f"{m.file}: {m.name}: {found}" for m in mutants if (found := problem(m, args.root))]
    if wrong or args.check or not mutants:
        print("\n".join(wrong) or f"{len(mutants)} mutants apply")
        return int(bool(wrong or not mutants))
    _load_what_tests_need()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return _try_all(mutants, copied(args.root, Path(folder, "copy")))


def copied(root: Path, copy: Path) -> Path:
    """`copy`, a new folder with what the tests need of the tree `root`."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        return _IGNORED(folder, names) | (_RESULTS if Path(folder) == root else set())

    shutil.copytree(root, copy, ignore=ignored)
    return copy


def _try_all(mutants: Sequence[Mutant], copy: Path) -> int:
    code, text, seconds = _run(copy, sorted({mutant.caught_by for mutant in mutants}))
    print(f"{seconds:6.1f} s  the tests pass without a fault: {'yes' if code == 0 else 'NO'}", flush=True)
    if code:
        print(text[-3000:])
        return 1
    results = [_try(mutant, copy) for mutant in mutants]
    print(f"{results.count('caught')} of {len(results)} caught")
    return int(set(results) != {"caught"})


def _try(mutant: Mutant, copy: Path) -> str:
    """ "caught", "SURVIVED", or a description of any other result; prints a line with it."""
    path = copy / mutant.path
    before = path.read_text()
    path.write_text(mutant.applied(before))
    try:
        code, text, seconds = _run(copy, [mutant.caught_by])
    finally:
        path.write_text(before)
    result = {0: "SURVIVED", 1: "caught"}.get(code, f"BROKEN, exit code {code}: {text[-500:]}")
    print(f"{seconds:6.1f} s  {result:9}{mutant.file}: {mutant.name} ({mutant.caught_by})", flush=True)
    return result


def _run(copy: Path, tests: list[str]) -> tuple[int, str, float]:
    """(pytest's exit code, its output, seconds) of `tests` in `copy`, against the package in `copy`."""
    log = copy.with_name("log")
    begun = time.monotonic()
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(copy, tests, log))
    child.start()
    child.join(_LIMIT_S)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode or 0, log.read_text(errors="replace"), time.monotonic() - begun


def _pytest(copy: Path, tests: list[str], log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    # No bytecode: if a file changes twice in one second, python would use the bytecode of the first version.
    sys.dont_write_bytecode = True
    sys.exit(int(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests])))


def _load_what_tests_need() -> None:
    """Imports libraries once, for every forked child: a mutant then takes only as long as its test."""
    os.environ.setdefault("NPROC", "8")  # as in tests/conftest.py, before jax is loaded
    for name in ("jax", "flax.linen", "flax.nnx", "optax", "safetensors"):
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
