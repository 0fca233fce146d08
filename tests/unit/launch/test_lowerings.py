"""Fast CPU convolutions, also in loops, and gradients of kernels and max pooling, with jax's numbers."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cyxjax.launch.backend.jax_private import lowering_rule
from cyxjax.launch.backend.lowerings import use_quick_operations

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
    "1x1": (IMAGE, (1, 1, 4, 6), "float32", {"window_strides": (2, 2)}),
    "5x5, few features": (IMAGE, (5, 5, 4, 6), "float32", {}),
    "5x5, many features": (IMAGE, (5, 5, 4, 32), "float32", {"window_strides": (1, 2)}),
    "three dimensions, many features": (SOLID, (3, 3, 3, 4, 32), "float32", {"window_strides": (1, 1, 1)}),
    "without all rows": (
        (2, 12, 12, 4),
        (3, 3, 4, 6),
        "float32",
        {"padding": "VALID", "window_strides": (2, 2)},
    ),
    "cut off": (IMAGE, (3, 3, 4, 6), "float32", {"padding": [(-1, 0), (1, -2)]}),
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

    drawn = (np.random.default_rng(n).normal(size=shape) for n, shape in enumerate((image, kernel)))
    return lambda *args: jax.grad(loss, argnums=(0, 1))(*args), [a.astype(jnp.dtype(dtype)) for a in drawn]


def looped(function):
    """`function` of the arguments, in a loop of one round that XLA cannot see through."""

    def run(rounds, *args):
        return lax.fori_loop(0, rounds, lambda _, made: function(*args), jax.tree.map(jnp.zeros_like, args))

    return jax.jit(run)


@pytest.fixture
def as_jax_does():
    """jax's own way to lower convolutions and pooling, until the test calls it."""
    for primitive in (lax.conv_general_dilated_p, lax.select_and_scatter_add_p):
        mlir.register_lowering(primitive, lowering_rule(primitive), platform="cpu")

    def end():
        use_quick_operations.cache_clear()
        use_quick_operations()

    yield end
    end()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_jaxs_own_and_in_a_loop_all_have_the_layout_of_the_quick_one(as_jax_does, kind):
    function, args = gradients_of(kind)
    theirs, their_loop = jax.jit(function)(*args), looped(function).lower(1, *args)
    as_jax_does()
    again, _ = gradients_of(kind)
    ours, our_loop = [jax.jit(again)(*args)], looped(again).lower(1, *args).compile()
    if kind != "groups":  # in a loop XLA still computes them differently
        ours.append(our_loop(1, *args))
    if kind not in ("groups", "complex", "transposed"):  # which have no fast kernel outside loops either
        assert len(layouts(their_loop.compile())) > len(layouts(our_loop)) == 1
    for images, kernel in ours:
        if kind != "complex":  # whose parts are convolutions of their own, the gradient of the images too
            np.testing.assert_array_equal(images, theirs[0])
        np.testing.assert_array_equal(kernel, ours[0][1])
        # The same products added in a different order: up to 256 of them, of about 1.
        np.testing.assert_allclose(kernel, theirs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "count"), [("plain", 1), ("5x5, few features", 2), ("bfloat16", 2)])
def test_the_gradient_of_a_kernel_is_products_where_they_are_quick(as_jax_does, kind, count):
    as_jax_does()
    function, (images, kernel) = gradients_of(kind)
    program = jax.jit(lambda kernel: function(images, kernel)[1]).lower(kernel).as_text()
    assert program.count("stablehlo.convolution") == count


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


def layouts(compiled) -> set[str]:
    """The layouts of the convolutions in the optimized program."""
    return set(re.findall(r"dim_labels=([\w>-]+)", compiled.as_text()))


# Few values, so that most windows have ties.
VALUES = [-np.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, np.nan]


@st.composite
def poolings(draw):
    """(images, window sizes, strides, padding): most tile the images; the others use XLA's own code."""
    dims = draw(st.integers(1, 3))
    sizes = st.tuples(*[st.integers(1, 3)] * dims)
    window = draw(sizes)
    strides = window if draw(st.booleans()) else draw(sizes)
    shape = draw(st.lists(st.integers(3, 7), min_size=dims, max_size=dims))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    images = rng.choice(np.float32(VALUES), (2, *shape, 2)).astype(jnp.dtype(dtype))
    sides = st.tuples(st.integers(0, 1), st.integers(0, 1))
    padding = st.sampled_from(["VALID", "SAME"]) | st.lists(sides, min_size=dims, max_size=dims)
    return images, window, strides, draw(padding)


@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=(pytest.mark.slow, pytest.mark.wide))])
def test_gradients_of_max_pooling_have_the_bits_of_jaxs_own(as_jax_does, examples):
    theirs = []

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(poolings())
    def collect(pooling):
        theirs.append((pooling, gradient_of_pool(*pooling)))

    collect()
    as_jax_does()
    assert len(theirs) >= examples
    for pooling, gradient in theirs:
        again = gradient_of_pool(*pooling)
        assert again.dtype == gradient.dtype
        as_bits = f"uint{8 * again.dtype.itemsize}"  # 0.0 and -0.0 differ
        np.testing.assert_array_equal(np.asarray(again).view(as_bits), np.asarray(gradient).view(as_bits))


def gradient_of_pool(images, window, strides, padding):
    """The gradient of a randomly weighted sum of the window maxima."""

    def total(images):
        largest = nn.max_pool(images, window, strides, padding)
        weights = np.random.default_rng(0).choice([-1.5, -0.0, 0.0, 0.7, 2.1], largest.shape)
        kept = jnp.where(jnp.isfinite(largest), largest, 0)  # so that the total is finite
        return jnp.sum(kept * jnp.asarray(weights, images.dtype))

    return jax.jit(jax.grad(total))(images)


@pytest.mark.parametrize(
    ("window", "strides", "padding", "is_quick"),
    [
        ((2, 2), (2, 2), "VALID", True),
        ((3, 2), (3, 2), "VALID", True),  # with rows and columns outside all windows
        ((3, 3), (2, 2), "VALID", False),
        ((3, 3), (3, 3), "SAME", False),
        ((9, 9), (9, 9), "VALID", False),  # 81 places
    ],
)
def test_windows_that_tile_the_images_are_views(as_jax_does, window, strides, padding, is_quick):
    as_jax_does()
    pool = lambda images: nn.max_pool(images, window, strides, padding).sum()  # noqa: E731
    program = jax.jit(jax.grad(pool)).lower(np.zeros((2, 10, 10, 3), np.float32)).as_text()
    assert ("select_and_scatter" not in program) == is_quick


def test_forward_and_second_derivatives_of_max_pooling(as_jax_does):
    x = np.random.default_rng(2).normal(size=(1, 4, 4, 2)).astype(np.float32)
    pooled = lambda x: (nn.max_pool(x, (2, 2), (2, 2)) ** 3).sum()  # noqa: E731
    found = lambda x: (  # noqa: E731
        *jax.jvp(pooled, (x,), (jnp.ones_like(x),)),
        jax.grad(lambda x: (jax.grad(pooled)(x) * x).sum())(x),
        jax.vmap(jax.grad(pooled))(x[None]),
    )
    theirs = jax.jit(found)(x)
    as_jax_does()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), theirs, jax.jit(lambda x: found(x))(x))
