"""Initial values drawn leaf by leaf: the bits of one program for all, with few programs for many leaves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax.linen import initializers

from cyxjax.core.model import first_values
from cyxjax.core.model.first_values import draw, find_kinds
from tests.support.models import first_values_as_for_users as first_values_as_for_users

pytestmark = pytest.mark.usefixtures("first_values_as_for_users")
one_program = partial(jax.jit, compiler_options=first_values._OPTIONS)


class Deep(linen.Module):
    layers: int

    @linen.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = linen.relu(linen.LayerNorm()(linen.Dense(8)(x)))
        return linen.Dense(3)(x)


class Cell(linen.Module):
    @linen.compact
    def __call__(self, carry, _):
        return linen.Dense(40)(carry), None


class Various(linen.Module):
    """Initializers of many kinds, with values from data, from a table and from each other."""

    @linen.compact
    def __call__(self, x):
        for init in (initializers.orthogonal(), initializers.he_uniform()):
            x = linen.Dense(40, kernel_init=init)(x)
        cells = linen.scan(Cell, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = cells()(x, None)
        x = linen.WeightNorm(linen.Dense(6, kernel_init=initializers.ones))(x)
        table = np.linspace(0, 1, 6, dtype=np.float32)
        self.param("near_table", lambda key: table * jax.random.normal(key, (6,)) * 0.1 + table)
        for dtype in (jnp.complex64, jnp.bfloat16, jnp.float16):
            self.param(jnp.dtype(dtype).name, initializers.normal(0.02, dtype), (5,))
        both = self.param("whole", lambda key: jax.random.bits(key, (1100,)))  # large, and used twice
        self.param("order", lambda key: jnp.argsort(both))
        self.variable("batch_stats", "seen", lambda: x.mean() + jnp.zeros(3))
        self.variable("constants", "ready", lambda: 3)
        return linen.BatchNorm(use_running_average=True)(x)


def drawing(module):
    return lambda key, x: module.init(dict(zip(("params", "dropout"), jax.random.split(key), strict=True)), x)


@pytest.mark.parametrize("module", [Deep(3), Various()], ids=["deep", "various"])
def test_the_values_are_those_of_one_program(module):
    values, args = drawing(module), (jax.random.key(7), np.ones((2, 8), np.float32) / 3)
    one, apart = one_program(values)(*args), draw(values, *args)
    assert jax.tree.structure(one) == jax.tree.structure(apart)
    for (path, want), have in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(apart), strict=True
    ):
        assert (want.dtype, want.weak_type) == (have.dtype, have.weak_type), path
        assert np.asarray(want).tobytes() == np.asarray(have).tobytes(), path


def test_more_layers_make_no_more_programs():
    args = jax.random.key(0), np.ones((1, 8), np.float32)
    kinds = [find_kinds(jax.make_jaxpr(drawing(Deep(n)))(*args), list(args)) for n in (3, 30)]
    # Kernel, biases and scale of a layer, kernel and bias of the last; zeros of one shape are one kind.
    assert [len(found) for found in kinds] == [5, 5]
    assert [sum(len(kind.members) for kind in found) for found in kinds] == [4 * 3 + 2, 4 * 30 + 2]


def test_a_second_model_with_such_leaves_makes_no_program():
    x, made = np.ones((2, 8), np.float32), first_values._program.cache_info
    draw(drawing(Deep(2)), jax.random.key(0), x)
    before = made().misses
    again, key = drawing(Deep(3)), jax.random.key(1)
    drawn = draw(again, key, x)
    assert made().misses == before
    jax.tree.map(np.testing.assert_array_equal, drawn, one_program(again)(key, x))
    draw(drawing(linen.Dense(5)), key, x)  # of a different shape
    assert made().misses == before + 1


def test_a_program_that_holds_a_table_is_not_kept():
    kept = first_values._program.cache_info().currsize
    tables = [np.arange(5, dtype=np.float32), np.ones(5, np.float32)]
    drawn = [draw(lambda key, t=t: jax.random.normal(key, (5,)) * 0 + t, jax.random.key(0)) for t in tables]
    assert [np.asarray(a).tolist() for a in drawn] == [[0, 1, 2, 3, 4], [1] * 5]
    assert first_values._program.cache_info().currsize == kept


def test_what_hangs_together_is_drawn_together():
    def values(key):  # each leaf depends on all before it
        leaves = [jax.random.normal(key, (2,))]
        for _ in range(10):
            leaves.append(leaves[-1] * 2 + 1)
        return leaves

    key = jax.random.key(1)
    assert find_kinds(jax.make_jaxpr(values)(key), [key]) is None
    assert [a.tolist() for a in draw(values, key)] == [a.tolist() for a in one_program(values)(key)]


def test_constants_that_differ_in_the_last_digits_are_different_ones():
    key, drawn = jax.random.key(0), []
    for size in (0.000123456, 0.000123457):
        values = lambda key, size=size: [jax.random.normal(key, (5,)) * size]  # noqa: E731
        drawn.append((draw(values, key)[0].tolist(), one_program(values)(key)[0].tolist()))
    assert [one for one, _ in drawn] == [wanted for _, wanted in drawn]
