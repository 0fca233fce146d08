"""Every test asserts: itself, by a helper in its file, or by one named assert_..., check_... and so on."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.places import TESTS

HELD = {"raises", "warns", "fail"}  # pytest's
NAMED = ("assert", "check", "expect", "refuse")


def silent(text: str) -> list[str]:
    """The tests in `text` that pass regardless of what their calls return."""
    functions = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    return [
        name for name in functions if name.startswith("test_") and not _holds(name, functions, frozenset())
    ]


def _holds(name: str, functions: dict[str, ast.FunctionDef], seen: frozenset[str]) -> bool:
    """Whether the function, or a function of the file that it names, asserts."""
    for word in _words(functions[name]):
        if word in HELD or word.startswith(NAMED):
            return True
        if word in functions and word not in seen | {name} and _holds(word, functions, seen | {name}):
            return True
    return False


def _words(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            yield "assert"
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def test_every_test_asserts():
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 150
    assert [f"{file.relative_to(TESTS)}: {name}" for file in files for name in silent(file.read_text())] == []


@pytest.mark.parametrize(
    "body",
    ["train()", "found = train()\n    print(found)", "helper()", "with warnings.catch_warnings(): train()"],
)
def test_a_test_that_only_runs_is_found(body):
    assert silent(f"def helper():\n    train()\ndef test_it():\n    {body}\n") == ["test_it"]


@pytest.mark.parametrize(
    "body",
    [
        "assert train()",
        "with pytest.raises(ValueError): train()",
        "np.testing.assert_allclose(train(), 1)",
        "helper()",
        "jax.tree.map(np.testing.assert_array_equal, a, b)",
    ],
)
def test_a_test_that_asserts_is_left_alone(body):
    assert silent(f"def helper():\n    assert train()\ndef test_it():\n    {body}\n") == []
