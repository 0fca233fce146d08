"""Folders of this checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "cyxjax", ROOT / "tests"
