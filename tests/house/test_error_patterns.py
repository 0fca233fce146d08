"""Tests match what an error names: a key, value, file, function or number, so messages can be reworded."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.places import TESTS, trees

# Two adjacent lower-case words. Not words: `commands`, 'values', and parts of a name, path or call.
SENTENCE = re.compile(r"(?<![\w./=-])[a-z]{2,},? [a-z]{2,}(?![\w=(./-])")
QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"|\\\([^)]*\)")


def is_sentence(pattern: str) -> bool:
    return SENTENCE.search(QUOTED.sub("'", pattern)) is not None


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each `match=` that contains a sentence, also from a parametrized argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [arg.arg for arg in node.args.args]
            names = {name for name in _names_matched(node) if name in arguments}
            patterns = [*_columns(node, names)]
        elif isinstance(node, ast.keyword) and node.arg == "match":
            patterns = [(node.value.lineno, _text(node.value))]
        else:
            continue
        yield from ((line, pattern) for line, pattern in patterns if is_sentence(pattern))


def _text(node: ast.expr) -> str:
    """The text of a string; `{}` stands for each inserted value, and for anything that is not a string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


def _names_matched(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield from (part.id for part in ast.walk(node.value) if isinstance(part, ast.Name))


def _columns(function: ast.FunctionDef, names: set[str]) -> Iterator[tuple[int, str]]:
    """The values that `parametrize` assigns to `names`."""
    for call in function.decorator_list:
        if not isinstance(call, ast.Call) or len(call.args) < 2 or not isinstance(call.args[1], ast.List):
            continue
        head, rows = call.args[0], call.args[1].elts
        columns = [_text(one) for one in head.elts] if isinstance(head, ast.Tuple) else [_text(head)]
        for row in rows:
            cells = row.elts if isinstance(head, ast.Tuple) and isinstance(row, ast.Tuple) else [row]
            for name, cell in zip(columns, cells, strict=False):
                if name in names:
                    yield cell.lineno, _text(cell)


def test_no_pattern_is_a_sentence():
    found = [
        f"{file}:{line}: {text!r}" for file, tree in trees(TESTS).items() for line, text in sentences(tree)
    ]
    assert len(trees(TESTS)) > 150
    assert found == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("raises(E, match='is not known')", 1),
        ("raises(E, match=f'{key} was set after')", 1),
        ("raises(E, match='^batch_size=3 .*global_batch_size')", 0),
        ("raises(E, match='step 2 .*3 bytes')", 0),
        ("raises(E, match=r'x\\.yaml: .*`cyxjax config`')", 0),
        ("@parametrize(('a', 'b'), [('so it is', 'x')])\ndef test(a, b):\n    raises(E, match=a)", 1),
        ("@parametrize(('a', 'b'), [('so it is', 'x')])\ndef test(a, b):\n    raises(E, match=b)", 0),
        ("@parametrize('a', ['so it is'])\ndef test(a):\n    raises(E, match=f'{a}.*')", 1),
    ],
)
def test_sentences_are_found_where_they_are_given(text, number):
    assert len(list(sentences(ast.parse(text)))) == number
