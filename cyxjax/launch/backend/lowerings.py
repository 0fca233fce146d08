"""Operations that XLA computes quickly on CPUs in one form only: programs are lowered to that form.

The gradient of a convolution's kernel. XLA computes it as a convolution whose kernel is as large as an image,
which takes 2 to 17 times as long as the matrix products that it consists of.

Other convolutions. XLA's fast form takes images (batch, spatial dimensions, features) and a kernel (spatial
dimensions, input features, output features). It transposes others, but only outside of loops: inside
`lax.scan` and `lax.fori_loop` they took 10 to 30 times as long. Here they are transposed as XLA does it
outside of loops: the optimized program, and so every bit, is the same there.

The gradient of max pooling with windows that tile the images. XLA walks through the windows one place at a
time. Here a window is as many strided views of the images as it has places, and all views are one vectorised
loop: 5 to 9 times as fast, with the same bits.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from cyxjax.launch.backend.jax_private import lowering_rule

_MOST_PLACES = 64  # of a window or kernel: each is an array of the program
Quick = Callable[..., jax.Array] | None


@cache
def use_quick_operations() -> None:
    """From now on, all programs that this process compiles for CPUs have the quick operations."""
    _register(lax.conv_general_dilated_p, _quick_convolution)
    _register(lax.select_and_scatter_add_p, _quick_scatter)


def _register(primitive: Any, quick_form: Callable[..., Quick]) -> None:
    """quick_form: called with the shapes of operands and output of `primitive` and its settings; returns the
    function of operands and settings to compute instead, or None for jax's own way.
    """
    jaxs_own = lowering_rule(primitive)
    if jaxs_own is None:
        return

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **settings: Any) -> Any:
        arrays = (*ctx.avals_in, *ctx.avals_out)
        is_sharded = any(any(array.sharding.spec) for array in arrays)
        quick = None if is_sharded else quick_form(*arrays, **settings)
        lower = jaxs_own if quick is None else mlir.lower_fun(quick, multiple_results=False)
        return lower(ctx, *operands, **settings)

    mlir.register_lowering(primitive, rule, platform="cpu")


# ---- convolutions ------------------------------------------------------------------------------------------


def _quick_convolution(images: Any, kernel: Any, out: Any, **settings: Any) -> Quick:
    if settings["feature_group_count"] * settings["batch_group_count"] > 1:
        return None
    if out.dtype == jnp.float32 and _are_products_quick(kernel, out, **settings):
        return _as_products
    is_short = jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize <= 4
    has_layout = settings["dimension_numbers"] == _quick_layout(out.ndim)
    return _in_quick_layout if is_short and not has_layout else None


def _are_products_quick(kernel: Any, out: Any, **settings: Any) -> bool:
    """Whether the kernel is larger than what comes out, as in the gradient of a kernel.

    With few features products are slower beyond 3x3 places: the gradients of LeNet took up to twice as long.
    """
    _, (_, _, *under), (_, features, *places) = settings["dimension_numbers"]
    size, num_places = (math.prod(a.shape[d] for d in dims) for a, dims in ((kernel, under), (out, places)))
    is_quick = num_places <= 9 or (num_places <= _MOST_PLACES and out.shape[features] >= 32)
    return size > num_places and is_quick and set(settings["lhs_dilation"]) <= {1}


def _as_products(images: jax.Array, kernel: jax.Array, **settings: Any) -> jax.Array:
    """`lax.conv_general_dilated`: for each row of places one product of what they see with the kernel."""
    (batch, *seen), (features, *under), out_at = settings["dimension_numbers"]
    strides, steps = settings["window_strides"], settings["rhs_dilation"]
    widths = [(0, 0, 0), *((low, high, 0) for low, high in settings["padding"]), (0, 0, 0)]
    # (features, spatial dimensions, images): the order in which a gradient has them
    padded = lax.pad(images.transpose(*seen, batch), jnp.zeros((), images.dtype), widths)
    num_seen, *sides, num_images = padded.shape
    sizes = [kernel.shape[dim] for dim in under[1:]]
    spans = [(size - 1) * step + 1 for size, step in zip(sizes, steps, strict=True)]
    counts = [(side - span) // s + 1 for side, span, s in zip(sides, spans, strides, strict=True)]

    def view(*place: int) -> jax.Array:
        """(features and spatial dimensions of the kernel, images): what the place sees."""
        starts = [at * stride for at, stride in zip(place, strides, strict=True)]
        ends = [start + span for start, span in zip(starts, spans, strict=True)]
        return lax.slice(padded, (0, *starts, 0), (num_seen, *ends, num_images), (1, *steps, 1))

    depth, width = num_seen * math.prod(sizes), kernel.shape[features]
    flat = kernel.transpose(*under, features).reshape(depth, width)
    kept = {name: settings[name] for name in ("precision", "preferred_element_type")}
    rows = []
    for row in product(*map(range, counts[:-1])):
        views = jnp.concatenate([view(*row, at) for at in range(counts[-1])], -1)
        views = views.reshape(depth, counts[-1] * num_images)
        rows.append(lax.dot_general(views, flat, (((0,), (0,)), ((), ())), **kept))
    found = jnp.stack(rows).reshape(*counts, num_images, width)
    images_and_features = (len(counts), len(counts) + 1)
    return jnp.moveaxis(found, (*images_and_features, *range(len(counts))), out_at)


def _quick_layout(ndim: int) -> lax.ConvDimensionNumbers:
    spatial = tuple(range(1, ndim - 1))
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return lax.ConvDimensionNumbers((0, ndim - 1, *spatial), kernel, (0, ndim - 1, *spatial))


def _in_quick_layout(images: jax.Array, kernel: jax.Array, **settings: Any) -> jax.Array:
    """`lax.conv_general_dilated`, computed in the quick layout. settings: of the primitive."""
    images_at, kernel_at, out_at = settings.pop("dimension_numbers")
    quick = _quick_layout(images.ndim)
    out = lax.conv_general_dilated_p.bind(
        jnp.moveaxis(images, images_at, quick.lhs_spec),
        jnp.moveaxis(kernel, kernel_at, quick.rhs_spec),
        dimension_numbers=quick,
        **settings,
    )
    return jnp.moveaxis(out, quick.out_spec, out_at)


# ---- the gradient of max pooling ---------------------------------------------------------------------------


def _quick_scatter(source: Any, images: Any, out: Any, **settings: Any) -> Quick:
    window, padding = settings["window_dimensions"], settings["padding"]
    are_tiles = tuple(window) == tuple(settings["window_strides"]) and not any(map(any, padding))
    is_float = jnp.issubdtype(images.dtype, jnp.floating)
    is_small = 1 < math.prod(window) <= _MOST_PLACES
    return _scatter_into_tiles if are_tiles and is_float and is_small else None


def _scatter_into_tiles(source: jax.Array, images: jax.Array, **settings: Any) -> jax.Array:
    """Zeros like `images`, but each entry of `source` at the place that its window selects.

    As XLA selects: a place stays selected while `select_prim` of it and the next one is true.
    """
    window = settings["window_dimensions"]
    ends = [count * size for count, size in zip(source.shape, window, strict=True)]
    views = (lax.slice(images, at, ends, window) for at in product(*map(range, window)))
    best = next(views)  # for each place of a window in turn: what all windows see there
    selected = lax.full_like(best, 0, jnp.uint8)
    for place, view in enumerate(views, 1):
        wins = ~settings["select_prim"].bind(best, view)
        best = lax.select(wins, view, best)
        selected = lax.select(wins, lax.full_like(selected, place), selected)

    within = tuple(range(1, 2 * images.ndim, 2))
    places = jnp.arange(math.prod(window), dtype=jnp.uint8).reshape([n for size in window for n in (1, size)])
    is_selected = jnp.expand_dims(selected, within) == places
    added = jnp.where(source == 0, 0, source)  # to zeros, as XLA does: -0.0 becomes 0.0
    tiles = jnp.where(is_selected, jnp.expand_dims(added, within), 0).reshape(ends)
    return lax.pad(
        tiles,
        jnp.zeros_like(tiles, shape=()),
        [(0, n - end, 0) for n, end in zip(images.shape, ends, strict=True)],
    )
