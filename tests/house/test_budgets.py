"""Size limits of package and tests. Raise a limit in a separate commit that explains the benefit."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "cyxjax"
MOST_FILES = 276
MOST_STATEMENTS = 17_915
MOST_STATEMENTS_OF_TESTS = 16_720
MOST_LINES_OF_CHECKS = 700  # train/checks: all checks before the first step
PRIVATE = "launch/backend/jax_private.py"  # the only file with private names of jax and jaxlib


def statements(tree: ast.AST) -> int:
    """The number of statements except imports and docstrings."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not _is_text(node)]
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in found)


def _is_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def test_statements_are_counted_without_imports_and_docstrings():
    text = '"""Words."""\nimport os\n\ndef f(x):\n    "More."\n    if x:\n        return os.sep\n'
    assert statements(ast.parse(text)) == 3


def test_the_package_keeps_its_budgets():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) <= MOST_FILES
    assert sum(statements(ast.parse(path.read_text())) for path in files) <= MOST_STATEMENTS
    tests = PACKAGE.with_name("tests").rglob("*.py")
    assert sum(statements(ast.parse(path.read_text())) for path in tests) <= MOST_STATEMENTS_OF_TESTS
    checks = (PACKAGE / "train" / "checks").glob("*.py")
    assert 0 < sum(len(path.read_text().splitlines()) for path in checks) <= MOST_LINES_OF_CHECKS


def private_imports(tree: ast.AST) -> list[str]:
    """Modules of jax and jaxlib that `tree` imports by a name with a leading underscore."""
    found = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found += [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    found += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in found if name.startswith("jax") and "._" in name]


def test_private_names_of_jax_stand_in_one_file():
    assert private_imports(ast.parse("from jax._src import core\nfrom jaxlib import _jax\nimport jax.numpy"))
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix() != PRIVATE:
            assert not private_imports(ast.parse(path.read_text())), path
