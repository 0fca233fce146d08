"""Folders of this checkout and the scripts in them."""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "cyxjax", ROOT / "tests"


@cache
def trees(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """The Python files in `folder`, parsed, by their name in it: those of the package take a second."""
    files = sorted(folder.rglob("*.py"))
    return {path.relative_to(folder).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


def module_of(script: Path) -> ModuleType:
    """A script outside the packages as a module: each call runs it again."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
