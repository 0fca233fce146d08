"""Every name in the porting table exists."""

from types import MemberDescriptorType, ModuleType

import pytest
from pydantic.fields import FieldInfo

from tests.guides.porting import ROWS, resolve, table


@pytest.mark.parametrize("ours", sorted({row.ours for row in ROWS}))
def test_each_name_of_the_table_exists(ours):
    found = resolve(ours)
    assert callable(found) or isinstance(found, ModuleType | FieldInfo | MemberDescriptorType | bool), found


def test_the_table_has_a_row_for_every_guide_and_no_row_twice():
    assert len(set(ROWS)) == len(ROWS)
    assert len({row.guide for row in ROWS}) == 5
    assert table().count("\n") == len(ROWS) + 1
