"""Every test asserts: itself, by a helper in its file, or by one named assert_..., check_... and so on."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.places import TESTS, trees

HELD = {"raises", "warns", "fail"}  # pytest's
NAMED = ("assert", "check", "expect", "refuse")


def silent(tree: ast.AST) -> list[str]:
    """The tests in `tree` that pass regardless of what their calls return."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
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
    assert len(trees(TESTS)) > 150
    assert [f"{file}: {name}" for file, tree in trees(TESTS).items() for name in silent(tree)] == []


@pytest.mark.parametrize(
    ("helper", "body", "found"),
    [
        ("train()", "train()", ["test_it"]),
        ("train()", "found = train()\n    print(found)", ["test_it"]),
        ("train()", "helper()", ["test_it"]),
        ("train()", "with warnings.catch_warnings(): train()", ["test_it"]),
        ("train()", "assert train()", []),
        ("train()", "with pytest.raises(ValueError): train()", []),
        ("train()", "np.testing.assert_allclose(train(), 1)", []),
        ("train()", "jax.tree.map(np.testing.assert_array_equal, a, b)", []),
        ("assert train()", "helper()", []),
    ],
)
def test_a_test_that_only_runs_is_found_and_one_that_asserts_is_left_alone(helper, body, found):
    assert silent(ast.parse(f"def helper():\n    {helper}\ndef test_it():\n    {body}\n")) == found
