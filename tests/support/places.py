"""Folders of this checkout and the scripts in them."""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "cyxjax", ROOT / "tests"


@cache
def trees() -> dict[str, ast.Module]:
    """The files of the package, parsed, by name below cyxjax/: parsing them takes a second."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


def module_of(script: Path) -> ModuleType:
    """A script outside the packages as a module: each call runs it again."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
