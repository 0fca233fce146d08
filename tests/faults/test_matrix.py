"""The fault matrix is whole: each row has tests that exist and were measured."""

import ast
import json
from functools import cache

import pytest

from tests.faults import matrix
from tests.faults.matrix_row import Row

MEASURED = json.loads(matrix.MEASURED.read_text())
TESTS = sorted({test for row in matrix.ROWS for test in row.tests})


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((matrix.ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_number_has_a_row_and_no_row_comes_twice():
    numbers = {name for row in matrix.ROWS for name in row.rows.split(", ")}
    assert numbers == {f"R{number}" for number in range(1, 43)} | {"hosts", "protocol", "pause", "launcher"}
    assert len({(row.rows, row.fault) for row in matrix.ROWS}) == len(matrix.ROWS)


@pytest.mark.parametrize("test", TESTS)
def test_each_test_of_the_matrix_exists(test):
    file, _, rest = test.partition("::")
    assert any(name.startswith("test_") for name in functions_of(file))
    assert not rest or rest.partition("[")[0] in functions_of(file)


def test_each_row_was_measured_and_nothing_else():
    for row in matrix.ROWS:
        for test in row.tests:
            assert row.needs or any(matrix.belongs(node, test) for node in MEASURED), test
    assert [node for node in MEASURED if not any(matrix.belongs(node, test) for test in TESTS)] == []


def test_the_table_has_a_line_for_each_row():
    assert matrix.table(MEASURED).count("\n") == len(matrix.ROWS) + 1


def test_a_report_is_read_and_a_skip_needs_a_reason(tmp_path):
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.faults.test_x" name="test_a[R1-1]" time="1.26"/>'
        '<testcase classname="tests.faults.test_x" name="test_b" time="0"><skipped message="pip install w"/>'
        "</testcase></testsuite></testsuites>"
    )
    found = matrix.read_report(tmp_path / "r.xml")
    assert found == {"faults/test_x.py::test_a[R1-1]": 1.3, "faults/test_x.py::test_b": "pip install w"}
    row = Row("R1", "", "", ("faults/test_x.py",))
    matrix.refuse_skips(found, [row._replace(needs="w")])
    with pytest.raises(SystemExit, match="test_b .*: pip .*w"):
        matrix.refuse_skips(found, [row])
