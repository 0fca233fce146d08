"""What would break `reproducibility: exact`, put in on purpose: one device and more then give other bits.

So the comparison sees each fault, and each rule of `core/exact` is needed, but for one:
with the update fused with the exchange the models here kept their bits. The two are apart because XLA may
contract a product of the update with the exchange's last addition, and nothing says that it does not.
"""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cyxjax.core import phases
from cyxjax.core.exact import calls, tree_sum
from cyxjax.core.mesh import AXIS, PER_REPLICA, REPLICATED, build_mesh
from cyxjax.core.replica import model_map
from tests.device.test_exact import as_users_compile, numbers_are_promoted  # noqa: F401 (fixtures)
from tests.support.exact import GLOBAL_BATCH, SAMPLES, Problem, config, digest, prepared, problem, train


def keyed_by_slot(monkeypatch) -> None:
    """Dropout follows the part's place on its device, not in the step."""
    real = calls.PartProgram.__call__

    def renumbered(self, states, parts, total):
        alone = calls.EachAlone(self.alone)  # a loop goes by these numbers: it would read other rows
        self.way = lambda *_: alone
        slots = [mine._replace(number=np.arange(len(mine.number), dtype=np.int32)) for mine in parts]
        return real(self, states, slots, total)

    monkeypatch.setattr(calls.PartProgram, "__call__", renumbered)


def summed_by_psum(monkeypatch) -> None:
    """The devices' own sums are added as XLA likes."""
    summed = lambda self, mine: lax.psum(mine.sum(0), AXIS)  # noqa: E731
    monkeypatch.setattr(tree_sum.TreeSum, "_summed", summed)


def a_sum_for_each_device(monkeypatch) -> None:
    """Each device adds up all its parts, however many: no subtrees of one tree."""

    def from_left(node, known, num_parts, add):
        inside = [n for n in sorted(known) if node.first <= n.first < node.first + node.width]
        return reduce(add, [known[n] for n in inside])

    monkeypatch.setattr(tree_sum, "cover", lambda mine, *_: [tree_sum.Node(mine.start, len(mine))])
    monkeypatch.setattr(tree_sum, "climb", from_left)


def all_rows_of_a_device_in_one_program(monkeypatch) -> None:
    """A device computes its parts at once: sums inside a program of another shape."""

    def together(self, states, parts, total):
        made = []
        for state, mine in zip(states, parts, strict=True):
            rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tuple(mine[1:]))
            whole = self.alone(state, calls.Part(mine.number[0], *rows), total)
            nothing = jax.tree.map(jnp.zeros_like, whole)
            made.append(calls.Apart([whole] + [nothing] * (len(mine.number) - 1)))
        return made

    monkeypatch.setattr(calls.PartProgram, "__call__", together)


def a_loop_where_a_device_has_many(monkeypatch) -> None:
    """A device with all parts loops over them, others call."""
    real = calls.PartProgram.__call__

    def chosen_by_layout(self, states, parts, total):
        first = (states[0], calls.row(parts[0], 0), total)
        like = self.alone.trace(*first).out_info
        of = lambda mine: (  # noqa: E731
            calls.InALoop(self._function, None, len(mine.number), like)
            if len(states) == 1
            else calls.EachAlone(self.alone)
        )
        self._calls = self._calls or of(parts[0])
        return real(self, states, parts, total)

    monkeypatch.setattr(calls.PartProgram, "__call__", chosen_by_layout)


WIDE = (pytest.mark.slow, pytest.mark.wide)


# By default one fault of the draws and one of the sums: each comparison sees what it is for.
@pytest.mark.parametrize(
    "fault",
    [
        keyed_by_slot,
        summed_by_psum,
        pytest.param(a_sum_for_each_device, marks=WIDE),
        pytest.param(all_rows_of_a_device_in_one_program, marks=WIDE),
    ],
)
def test_a_fault_gives_other_bits(fault: Callable, monkeypatch):
    fault(monkeypatch)
    one = problem("mlp")
    devices = 3 if fault is summed_by_psum else 2  # the sum of two has one order
    assert train(one, devices).params != train(one, 1).params


@pytest.mark.slow
@pytest.mark.wide
def test_a_loop_on_one_layout_gives_other_bits(monkeypatch, as_users_compile):  # noqa: F811
    a_loop_where_a_device_has_many(monkeypatch)
    one = problem("cnn")
    assert train(one, 3).params != train(one, 1).params


@pytest.mark.slow
@pytest.mark.wide
def test_batch_norm_merged_by_a_plain_mean_gives_other_bits(monkeypatch):
    # The last step is short, so parts differ in their samples: they must count by them.
    assert SAMPLES % GLOBAL_BATCH % 8
    right = train(problem("cnn"), 1)
    every, divided = GLOBAL_BATCH // 8, phases.divided_state
    monkeypatch.setattr(
        phases, "weighted_state", lambda state, _: jax.tree.map(lambda leaf: leaf * every, state)
    )
    monkeypatch.setattr(phases, "divided_state", lambda summed, _, like: divided(summed, GLOBAL_BATCH, like))
    assert train(problem("cnn"), 1).model_state != right.model_state


def first_parts(one: Problem) -> tuple:
    """(the program of a part, a state, two parts of four rows each)."""
    program, start = prepared(one, build_mesh(jax.devices()[:1]), config(), None, ())
    of = lambda n: (one.data.inputs[4 * n : 4 * n + 4], one.data.targets[4 * n : 4 * n + 4])  # noqa: E731
    rows = [calls.Part(np.int32(n), *of(n), np.ones(4, np.float32)) for n in range(2)]
    return program.train_step.part.alone, jax.tree.map(np.asarray, start.state), rows


def stacked(rows: list[calls.Part]) -> calls.Part:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def over_two_devices(part, state, rows, total):
    """Both parts at once, a device each, as plain data parallel does."""

    def mine(state, one, total):
        made = part.__wrapped__(state, jax.tree.map(lambda a: a[0], one), total)
        return jax.tree.map(lambda a: a[None], made)

    specs = (REPLICATED, PER_REPLICA, REPLICATED)
    return jax.jit(model_map(mine, build_mesh(jax.devices()[:2]), specs, PER_REPLICA))(
        state, stacked(rows), total
    )


def in_a_loop(part, state, rows, total):
    """One part after another inside one program."""
    body = lambda _, one: (None, part.__wrapped__(state, one, total))  # noqa: E731
    return jax.jit(lambda rows: lax.scan(body, None, rows)[1])(stacked(rows))


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize(("way", "name"), [(over_two_devices, "gpt"), (in_a_loop, "cnn")])
def test_another_program_gives_other_bits_of_the_same_part(way, name, as_users_compile):  # noqa: F811
    # the same rows, number and state, and the same function: only what XLA makes of it differs
    part, state, rows = first_parts(problem(name))
    total = np.float32(GLOBAL_BATCH)
    other = jax.tree.map(lambda a: np.asarray(a)[0], way(part, state, rows, total))
    assert digest(other) != digest(part(state, rows[0], total))
