"""Every name the porting table promises is there."""

from types import ModuleType

import pytest
from pydantic.fields import FieldInfo

from tests.guides.porting import MAKER, README, ROWS, resolve, table
from tests.support.tables import with_table


@pytest.mark.parametrize("ours", sorted({row.ours for row in ROWS}))
def test_each_name_of_the_table_exists(ours):
    found = resolve(ours)
    assert callable(found) or isinstance(found, ModuleType | FieldInfo | bool), found


def test_the_table_has_a_row_for_every_guide_and_no_row_twice():
    assert len(set(ROWS)) == len(ROWS)
    assert len({row.guide for row in ROWS}) == 5
    assert table().count("\n") == len(ROWS) + 1


def test_the_readme_shows_the_table():
    text = README.read_text()
    assert with_table(text, MAKER, table()) == text


def test_a_table_is_put_between_its_marks_only():
    text = "a\n<!-- table: written by x -->\nold\n<!-- table: end of x -->\nb\n"
    new = "a\n<!-- table: written by x -->\n\n| 1 |\n\n<!-- table: end of x -->\nb\n"
    assert with_table(text, "x", "| 1 |") == new
    with pytest.raises(ValueError, match="HINT: put them back"):
        with_table(text, "y", "| 1 |")
