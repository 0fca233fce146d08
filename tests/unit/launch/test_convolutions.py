"""Convolutions inside a loop: XLA's quick ones, with the bits of jax's own outside of it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cyxjax.launch.backend import convolutions
from cyxjax.launch.backend.jax_private import convolution_rule

IMAGE, LINE, SOLID = (4, 8, 8, 4), (4, 8, 4), (4, 4, 4, 4, 4)
# (shape of the images, of the kernel, dtype, settings)
KINDS = {
    "plain": (IMAGE, (3, 3, 4, 6), "float32", {}),
    "strides": (IMAGE, (3, 3, 4, 6), "float32", {"window_strides": (2, 2)}),
    "dilated": (IMAGE, (3, 3, 4, 6), "float32", {"rhs_dilation": (2, 2)}),
    "transposed": (IMAGE, (3, 3, 4, 6), "float32", {"lhs_dilation": (2, 2), "padding": [(1, 2), (2, 1)]}),
    "uneven": (IMAGE, (2, 3, 4, 6), "float32", {"padding": [(0, 1), (2, 0)]}),
    "one dimension": (LINE, (3, 4, 6), "float32", {"window_strides": (1,)}),
    "three dimensions": (SOLID, (3, 3, 3, 4, 6), "float32", {"window_strides": (1, 1, 1)}),
    "bfloat16": (IMAGE, (3, 3, 4, 6), "bfloat16", {}),
    "features first": (IMAGE, (3, 3, 8, 6), "float32", {"dimension_numbers": ("NCHW", "HWIO", "NCHW")}),
    "groups": (IMAGE, (3, 3, 2, 6), "float32", {"feature_group_count": 2}),
    "complex": (IMAGE, (3, 3, 4, 6), "complex64", {}),
}


def gradients_of(kind):
    """A function of (images, kernel) -> both gradients, and its arguments."""
    image, kernel, dtype, settings = KINDS[kind]
    spatial = "DHW"[5 - len(image) :]
    layout = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": layout} | settings

    def loss(images, kernel):
        out = lax.conv_general_dilated(images, kernel, **settings)
        return jnp.sum(jnp.abs(jnp.sin(out).astype(jnp.complex64)) ** 2)

    drawn = [
        jax.random.normal(jax.random.key(n), shape).astype(dtype) for n, shape in enumerate((image, kernel))
    ]
    return lambda *args: jax.grad(loss, argnums=(0, 1))(*args), drawn


def looped(function):
    """`function` of the arguments, in a loop of one round that XLA cannot see through."""

    def run(rounds, *args):
        return lax.fori_loop(0, rounds, lambda _, made: function(*args), jax.tree.map(jnp.zeros_like, args))

    return jax.jit(run)


@pytest.fixture
def as_jax_does():
    """jax's own way to lower convolutions, until the test calls it."""
    mlir.register_lowering(lax.conv_general_dilated_p, convolution_rule(), platform="cpu")

    def end():
        convolutions.use_quick_layout.cache_clear()
        convolutions.use_quick_layout()

    yield end
    end()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_bits_of_jaxs_own_in_a_loop_and_outside(as_jax_does, kind):
    function, args = gradients_of(kind)
    theirs = jax.jit(function)(*args)
    as_jax_does()
    again, _ = gradients_of(kind)
    ours = [jax.jit(again)(*args)]
    if kind != "groups":  # in a loop XLA computes them in another way, as ever
        ours.append(looped(again)(1, *args))
    for made in ours:
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), theirs, made)))


# XLA has no quick one for the others, outside of loops either.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"groups", "complex", "transposed"}))
def test_in_a_loop_all_of_them_have_the_layout_of_the_quick_one(as_jax_does, kind):
    function, args = gradients_of(kind)
    before = layouts(looped(function), args)
    as_jax_does()
    again, _ = gradients_of(kind)
    assert len(before) > 1
    assert len(layouts(looped(again), args)) == 1


def test_dimensions_that_are_sharded_by_type_stay_where_they_are(as_jax_does):
    as_jax_does()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    cut = NamedSharding(mesh, PartitionSpec(None, None, None, "data"))
    run = partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("CHWN", "HWIO", "CHWN"),
    )
    images, kernel = np.ones((2, 8, 8, 4), np.float32), np.ones((3, 3, 2, 6), np.float32)
    with jax.set_mesh(mesh):
        ours = jax.jit(partial(run, out_sharding=cut))(jax.device_put(images, cut), kernel)
    assert jax.typeof(ours).sharding.spec == cut.spec
    np.testing.assert_array_equal(ours, run(images, kernel))


def layouts(program, args) -> set[str]:
    """Those of the convolutions of the optimized program."""
    return set(re.findall(r"dim_labels=([\w>-]+)", program.lower(1, *args).compile().as_text()))
