"""The fixed tree over the parts of a step: the same additions, however the parts are shared out."""

from functools import reduce

import pytest

from cyxjax.core.exact.tree_sum import Node, climb, cover, root

PARTS = range(1, 17)


def tree_text(num_parts):
    """The additions in full, as a text: equal texts, equal sums."""
    level = [str(i) for i in range(num_parts)]
    while len(level) > 1:  # neighbours first; an odd one goes up as it is
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [f"({'+'.join(pair)})" if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def added(a, b):
    return f"({a}+{b})"


@pytest.mark.parametrize("num_parts", PARTS)
def test_any_sharing_adds_in_the_same_order(num_parts):
    # 6 parts by hand: neighbours, then neighbours of those; the third pair goes up as it is
    assert tree_text(6) == "(((0+1)+(2+3))+(4+5))"
    parts = {Node(i, 1): str(i) for i in range(num_parts)}
    for devices in range(1, num_parts + 1):
        shares = [range(r * num_parts // devices, (r + 1) * num_parts // devices) for r in range(devices)]
        known = {
            node: climb(node, {p: parts[p] for p in parts if p.first in mine}, num_parts, added)
            for mine in shares
            for node in cover(mine, root(num_parts), num_parts)
        }
        assert climb(root(num_parts), known, num_parts, added) == tree_text(num_parts), devices


def test_a_device_sends_as_few_sums_as_the_tree_allows():
    # 8 parts: 0-3 are one subtree; 2-4 are (2+3) and 4; 3-4 have nothing in common below the root
    assert cover(range(4), root(8), 8) == [Node(0, 4)]
    assert cover(range(2, 5), root(8), 8) == [Node(2, 2), Node(4, 1)]
    assert cover(range(3, 5), root(8), 8) == [Node(3, 1), Node(4, 1)]
    # 6 parts: 4 and 5 are all there is of the node of width 4
    assert cover(range(4, 6), root(6), 6) == [Node(4, 4)]


@pytest.mark.parametrize("devices", [3, 5])
def test_groups_of_another_width_would_add_in_another_order(devices):
    # the control: each device adds up its own run from left to right, as a naive fold would
    shares = [range(r * 8 // devices, (r + 1) * 8 // devices) for r in range(devices)]
    runs = [reduce(added, [str(i) for i in mine]) for mine in shares]
    assert reduce(added, runs) != tree_text(8)
