"""How a device computes its parts, and the fixed tree that adds them up for any distribution of parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cyxjax.core.exact.calls import LoopedCalls, PartProgram, Parts, SeparateCalls, tree_of_each_part
from cyxjax.core.exact.tree_sum import Node, climb, cover, root

PARTS, TOTAL = 8, np.float32(32)
STATE = jnp.float32(2)


def of_numbers(numbers) -> Parts:
    """Parts whose inputs identify them: 10 n and 10 n + 1."""
    numbers = np.asarray(numbers, np.int32)
    inputs = (10 * numbers[:, None] + np.arange(2)).astype(np.float32)
    return Parts(numbers, inputs, inputs, np.ones((len(numbers), 2), np.float32))


def scaled(state, part, total):
    return {"rows": state * part.inputs / total, "number": part.number}


def squared(inputs):
    return inputs @ inputs.T


def convolved(inputs, groups=1):
    images, kernel = jnp.stack([inputs] * 2, 1)[None], jnp.ones((3, 2 // groups, 2))
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        images, kernel, (1,), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


def convolved_in_groups_below(inputs):
    in_groups = partial(convolved, groups=2)
    return jax.jit(lambda x: lax.cond(x.sum() > 0, in_groups, convolved, x))(inputs)


def printed(inputs):
    jax.debug.print("{}", inputs.sum())
    return inputs


@pytest.mark.parametrize(
    ("body", "size", "name"),
    [
        (squared, 8, "in a loop"),
        (convolved, 8, "in a loop"),
        (convolved_in_groups_below, 8, "each alone"),  # 10 to 30 times slower inside a loop
        (printed, 8, "each alone"),  # side effects happen once per call
        (lambda inputs: inputs * 2, 1_000_000, "in a loop"),
        (lambda inputs: inputs * 2, 2_000_000, "each alone"),  # 8 parts of 16 MB, in and out
    ],
)
def test_the_way_follows_from_the_program_of_a_part_and_their_number(body, size, name):
    inputs = np.zeros((1, size), np.float32)
    parts = Parts(np.zeros(1, np.int32), inputs, np.zeros((1, 1)), np.ones((1, 1), np.float32))
    body = body if body is not squared else lambda inputs: squared(inputs[None])
    program = PartProgram(lambda state, part, total: body(part.inputs), 8, PARTS)
    assert program.calls(STATE, parts, TOTAL).name == name


def test_a_loop_has_one_text_however_many_parts_a_device_has():
    calls = PartProgram(scaled, 3, PARTS).calls(STATE, of_numbers(range(2, 5)), TOTAL)
    assert isinstance(calls, LoopedCalls)
    texts = {calls.lower(STATE, of_numbers(mine), TOTAL).as_text() for mine in (range(8), range(2, 5), [7])}
    assert len(texts) == 1
    # A cache on disk identifies a program by its text: one for a different thread pool must differ.
    assert "loop_of_scaled_of_3_threads" in texts.pop()


@pytest.mark.parametrize("mine", [range(8), range(3), range(3, 5), range(7, 8)])
def test_both_ways_give_each_part_of_a_device_its_own(mine):
    parts = of_numbers(mine)
    program = PartProgram(scaled, 8, PARTS)
    for _ in range(2):  # the second step writes into the arrays of the first
        (looped,) = program([STATE], [parts], TOTAL)
        (called,) = SeparateCalls(program.alone)([STATE], [parts], TOTAL)
        for number, one, other in zip(mine, tree_of_each_part(looped, mine), called, strict=True):
            # 2 * (10 n, 10 n + 1) / 32
            assert one["rows"].tolist() == other["rows"].tolist() == [number * 0.625, number * 0.625 + 0.0625]
            assert one["number"] == other["number"] == number


def tree_text(num_parts):
    """All additions as text: equal texts mean equal sums."""
    level = [str(i) for i in range(num_parts)]
    while len(level) > 1:  # neighbours first; an unpaired one moves up unchanged
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [f"({'+'.join(pair)})" if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def added(a, b):
    return f"({a}+{b})"


@pytest.mark.parametrize("num_parts", range(1, 17))
def test_any_sharing_adds_in_the_same_order(num_parts):
    # 6 parts by hand: neighbours, then neighbours of the results; the third pair moves up unchanged
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
    # 8 parts: 0-3 are one subtree; 2-4 are (2+3) and 4; 3-4 share no node below the root
    assert cover(range(4), root(8), 8) == [Node(0, 4)]
    assert cover(range(2, 5), root(8), 8) == [Node(2, 2), Node(4, 1)]
    assert cover(range(3, 5), root(8), 8) == [Node(3, 1), Node(4, 1)]
    # 6 parts: 4 and 5 are all parts of the last node of width 4
    assert cover(range(4, 6), root(6), 6) == [Node(4, 4)]
