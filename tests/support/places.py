"""Folders of this checkout and the scripts in them."""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from cyxjax.launch import program

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "cyxjax", ROOT / "tests"


@cache
def trees(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """The Python files in `folder`, parsed, by their name in it: those of the package take a second."""
    files = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


def keep_digests() -> None:
    """From now on a test module is read once for the facts of a run: each fit reads those of all modules."""
    digest = program._digest
    of_module = cache(lambda path: digest([path], path.parent))

    def kept(files: list[Path], folder: Path) -> str:
        is_module = len(files) == 1 and str(files[0]).startswith(str(TESTS))
        return of_module(files[0]) if is_module else digest(files, folder)

    program._digest = kept


def module_of(script: Path) -> ModuleType:
    """A script outside the packages as a module: each call runs it again."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
