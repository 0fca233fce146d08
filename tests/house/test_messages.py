"""All messages of the package are in messages.txt, so that a change of wording shows as one line in a diff.

`python tests/house/test_messages.py` rewrites the file. No other test depends on a sentence.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "cyxjax"
FILE = Path(__file__).with_name("messages.txt")
FEWEST_WORDS = 4  # shorter texts are names, keys and parts of others


def messages(tree: ast.AST) -> Iterator[str]:
    """`Class: text` of each text argument of a call, in order; `{name}` stands for an inserted value."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            text = " ".join(_text(argument).split())
            if len(text.split()) >= FEWEST_WORDS and text.strip("{} "):
                yield f"{ast.unparse(call.func).rpartition('.')[2]}: {text}"


def _text(node: ast.expr) -> str:
    """The text of a string, an f-string or a sum of them; "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = [_value(p.value) if isinstance(p, ast.FormattedValue) else _text(p) for p in node.values]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _text(node.left), _text(node.right)
        return (sides[0] or _value(node.left)) + (sides[1] or _value(node.right)) if any(sides) else ""
    return ""


def _value(node: ast.expr) -> str:
    """`{expression}`; `{...}` for one that contains strings, which versions of Python quote differently."""
    own = any(isinstance(part, ast.JoinedStr) for part in ast.walk(node))
    return "{...}" if own else f"{{{ast.unparse(node)}}}"


def everything() -> str:
    pages = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if found := list(messages(ast.parse(path.read_text()))):
            pages.append(
                "\n".join([path.relative_to(PACKAGE).as_posix(), *(f"    {line}" for line in found)])
            )
    return "\n\n".join(pages) + "\n"


def test_messages_are_read_from_calls():
    text = (
        'raise ConfigError(f"{key}={value!r}: expected one of " + names)\n'
        'note("short text")\n'
        'print("saved after step", 3)\n'
        'warn("three of the ranks differ: " + say(f"{b}"))'
    )
    assert list(messages(ast.parse(text))) == [
        "ConfigError: {key}={value}: expected one of {names}",
        "warn: three of the ranks differ: {...}",
    ]


def test_the_file_holds_all_messages():
    assert FILE.read_text() == everything(), "python tests/house/test_messages.py writes messages.txt anew"


if __name__ == "__main__":
    FILE.write_text(everything())
