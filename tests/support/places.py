"""Folders of this checkout and the scripts in them."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "cyxjax", ROOT / "tests"


def module_of(script: Path) -> ModuleType:
    """A script outside the packages as a module: each call runs it again."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
