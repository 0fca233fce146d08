"""The fault matrix is complete: each number has a row, and each row has tests that exist."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults import matrix

TESTS = sorted({test for row in matrix.ROWS for test in row.tests})


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parents[1] / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_number_has_a_row_and_no_row_comes_twice():
    numbers = {name for row in matrix.ROWS for name in row.rows.split(", ")}
    assert numbers == {f"R{number}" for number in range(1, 43)} | {"hosts", "protocol", "pause", "launcher"}
    assert len({(row.rows, row.fault) for row in matrix.ROWS}) == len(matrix.ROWS)
    assert matrix.table().count("\n") == len(matrix.ROWS) + 1


@pytest.mark.parametrize("test", TESTS)
def test_each_test_of_the_matrix_exists(test):
    file, _, rest = test.partition("::")
    assert any(name.startswith("test_") for name in functions_of(file))
    assert not rest or rest.partition("[")[0] in functions_of(file)
