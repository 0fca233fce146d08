"""Size limits of package and tests. Raise a limit in a separate commit that explains the benefit."""

import ast

from tests.support.places import PACKAGE, TESTS, trees

MOST_FILES = 284
MOST_STATEMENTS = 18_399
MOST_STATEMENTS_OF_TESTS = 17_693
MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_CHECKS = 700  # train/checks: all checks before the first step


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
    counts = {
        "MOST_FILES": (len(trees()), MOST_FILES),
        "MOST_STATEMENTS": (sum(map(statements, trees().values())), MOST_STATEMENTS),
        "MOST_STATEMENTS_OF_TESTS": (sum(map(statements, trees(TESTS).values())), MOST_STATEMENTS_OF_TESTS),
    }
    over = {name: found for name, (found, most) in counts.items() if found > most}
    assert over == {}, "raise these limits in a commit of their own, before yours, that says what is gained"
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lines.values()) <= MOST_LINES_OF_A_FILE
    checks = PACKAGE / "train" / "checks"
    assert 0 < sum(lines[path] for path in lines if path.parent == checks) <= MOST_LINES_OF_CHECKS
