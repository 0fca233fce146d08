"""The layers of cyxjax: which subpackage may import which, and which calls are allowed in one place only."""

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import PACKAGE, ROOT, trees
from tests.support.programs import fresh

CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
ROWS = CONTRIBUTING.partition("| package | may import |\n")[2].partition("\n\n")[0]
# Subpackage -> subpackages that it may import, besides itself. Those below `train` take their part of a
# configuration, never the whole.
MAY_IMPORT = {
    room: set(others.split(", ")) for room, others in re.findall(r"^\| (\w+) \| (.+) \|$", ROWS, re.MULTILINE)
}
# Reviewed exceptions, each a late import (in a function, or for type checkers): (file, package) -> reason.
LATE: dict[tuple[str, str], str] = {
    ("distributed/__init__.py", room): "types only: names documented here that live upstairs"
    for room in ("train", "observe", "config")
} | {("checkpoint/tree.py", "core"): "names of leaves: one rule, loaded with jax when there are any"}
PRIVATE = "launch/backend/jax_private.py"  # the only file with private names of jax and jaxlib
ONLY_IN = {
    "shard_map": "core/replica.py",
    "keystr": "core/trees.py",
    "environ": "launch/",
    "getenv": "launch/",
    "putenv": "launch/",
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules that `tree` imports, at the top or later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(name: str, tree: ast.AST) -> Iterator[str]:
    room = name.split("/")[0].removesuffix(".py")
    if room in ("cli", "__init__", "__main__"):
        return  # these may import every subpackage
    for target in imports(tree):
        other = target.split(".")[1] if target.startswith("cyxjax.") else room
        allowed = other in MAY_IMPORT[room] | {room, "__version__", "_lazy"} or (name, other) in LATE
        if not allowed:
            yield f"{name} ({room}) imports {target}"


def test_no_file_needs_itself_through_others():
    # Not even inside a function or for a type: a reader would need to know both files at the same time.
    modules = {f"cyxjax.{name.removesuffix('.py').replace('/', '.')}": tree for name, tree in trees().items()}
    needs = {}
    for name, tree in modules.items():
        if not name.endswith("__init__"):  # lists the names of its files, and loads them on first use
            targets = [(target, target.rpartition(".")[0]) for target in imports(tree)]
            needs[name] = {found for pair in targets for found in pair if found in modules}
    graphlib.TopologicalSorter(needs).prepare()  # CycleError names the cycle


def strayed(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        used = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if not name.startswith(home := ONLY_IN.get(used, "")):
            yield f"{name}, line {node.lineno}: {used} belongs in {home}"


def private(name: str, tree: ast.AST) -> Iterator[str]:
    for target in imports(tree):
        if target.startswith("jax") and "._" in target and name != PRIVATE:
            yield f"{name} imports {target}, which belongs in {PRIVATE}"


# One test checks all files: one test per file took 12 s of CPU.
@pytest.mark.parametrize("rule", [wrong_imports, strayed, private])
def test_imports_go_one_way_and_some_names_stand_in_one_place_only(rule):
    wrong = [line for name, tree in trees().items() for line in rule(name, tree)]
    assert not wrong, "\n".join(wrong)


WITHOUT_JAX = (
    *("cyxjax", "cyxjax.launch", "cyxjax.config.run", "cyxjax.config.load", "cyxjax.cli.main"),
    *("cyxjax.launch.clusters", "cyxjax.launch.connect", "cyxjax.launch.environment"),
    "cyxjax.models.registry",
)
IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *{"jax", "numpy"} & set(sys.modules))
"""


def test_no_jax_is_loaded_by_what_starts_at_once():
    assert fresh("-c", IMPORTS, *WITHOUT_JAX).stdout.split() == [*WITHOUT_JAX]


def test_the_walls_would_be_seen_through():
    # each rule rejects a file that violates it, so that a rule without effect is noticed
    tree = ast.parse("import json\nfrom cyxjax.train.loop import fit\n")
    assert list(imports(tree)) == ["json", "cyxjax.train.loop.fit"]
    assert len(list(wrong_imports("observe/x.py", tree))) == 1
    used, home = next(iter(ONLY_IN.items()))
    assert list(strayed("elsewhere/x.py", ast.parse(f"a.{used}")))
    assert list(strayed("elsewhere/x.py", ast.parse(used)))
    assert not list(strayed(f"{home}/x.py", ast.parse(used)))
    tree = ast.parse("from jax._src import core\nfrom jaxlib import _jax\nimport jax.numpy")
    assert len(list(private("launch/x.py", tree))) == 2
    assert not list(private(PRIVATE, tree))


def test_the_table_has_a_row_for_each_package():
    assert len(MAY_IMPORT) == len(ROWS.splitlines()) - 1  # of the line below the head
    assert MAY_IMPORT.keys() >= {name.split("/")[0].removesuffix(".py") for name in trees()} - {
        "cli", "__init__", "__main__"
    }  # fmt: skip


def test_the_picture_in_the_documentation_shows_the_packages():
    text = (ROOT / ".github" / "docs" / "internals.md").read_text()
    block = re.search(r"^cyxjax/\n((?:  .*\n)+)", text, re.MULTILINE)[1]
    rooms = [line.split()[0].rstrip("/").removesuffix(".py") for line in block.splitlines()]
    found = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert set(rooms) == found - {"__init__", "__main__"}
    for number, room in enumerate(rooms):
        below = set(rooms[number:]) & MAY_IMPORT.get(room, set())
        assert not below, f"{room} stands above {below}, which it may import"


def test_a_room_has_few_files():
    rooms = Counter(str(Path(name).parent) for name in trees())
    assert {room: number for room, number in rooms.items() if number > 24} == {}
