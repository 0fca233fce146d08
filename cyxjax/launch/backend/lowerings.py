"""Operations that XLA computes quickly on CPUs in one form only: programs are lowered to that form.

Convolutions. XLA's quick one takes images (batch, spatial dimensions, features) and a kernel (spatial
dimensions, input features, output features). It transposes others, such as the gradient of a kernel, but only
outside of loops: inside `lax.scan` and `lax.fori_loop` they took 10 to 30 times as long. Here they are
transposed as XLA does it outside of loops: the optimized program, and so every bit, is the same there.

The gradient of max pooling with windows that tile the images. XLA walks through the windows one place at a
time. Here a window is as many strided views of the images as it has places, and all views are one vectorised
loop: 5 to 9 times as quick, with the same bits.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from cyxjax.launch.backend.jax_private import lowering_rule

_QUICK = re.compile(
    r" dim_numbers = \[b, [\d, ]*f\]x\[[\d, ]*i, o\]->\[b, [\d, ]*f\],"
    r".*batch_group_count = 1 : i64, feature_group_count = 1 : i64"
)
_MOST_PLACES = 64  # of a window; each is an array of the program, and large windows are few


@cache
def use_quick_operations() -> None:
    """From now on, all programs that this process compiles for CPUs have the quick operations."""
    _register(lax.conv_general_dilated_p, _can_have_quick_layout, _in_quick_layout)
    _register(lax.select_and_scatter_add_p, _can_be_tiles, _scatter_into_tiles)


def _register(primitive: Any, can_be_quick: Callable[..., bool], quick: Callable[..., jax.Array]) -> None:
    """`quick` takes the operands and the settings of `primitive`, `can_be_quick` its output and settings."""
    jaxs_own = lowering_rule(primitive)
    if jaxs_own is None:
        return
    lower_quick = mlir.lower_fun(quick, multiple_results=False)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **settings: Any) -> Any:
        is_sharded = any(any(array.sharding.spec) for array in (*ctx.avals_in, *ctx.avals_out))
        is_quick = not is_sharded and can_be_quick(ctx.avals_out[0], settings)
        return (lower_quick if is_quick else jaxs_own)(ctx, *operands, **settings)

    mlir.register_lowering(primitive, rule, platform="cpu")


def has_slow_in_loops(program: str) -> bool:
    """Whether a lowered program has a convolution that is slow in a loop: in groups, or of another layout."""
    return any("stablehlo.convolution" in line and not _QUICK.search(line) for line in program.splitlines())


# ---- convolutions ------------------------------------------------------------------------------------------


def _can_have_quick_layout(out: Any, settings: dict[str, Any]) -> bool:
    """Whether the quick convolution takes it, but for the layout: one of 16 or 32 bits, without groups."""
    is_grouped = settings["feature_group_count"] * settings["batch_group_count"] > 1
    has_layout = settings["dimension_numbers"] == _quick_layout(out.ndim)
    is_short = jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize <= 4
    return is_short and not has_layout and not is_grouped


def _quick_layout(ndim: int) -> lax.ConvDimensionNumbers:
    spatial = tuple(range(1, ndim - 1))
    kernel = (ndim - 1, ndim - 2, *range(ndim - 2))
    return lax.ConvDimensionNumbers((0, ndim - 1, *spatial), kernel, (0, ndim - 1, *spatial))


def _in_quick_layout(images: jax.Array, kernel: jax.Array, **settings: Any) -> jax.Array:
    """`lax.conv_general_dilated`, computed in the quick layout. settings: of the primitive."""
    images_at, kernel_at, out_at = settings.pop("dimension_numbers")
    quick = _quick_layout(images.ndim)
    out = lax.conv_general_dilated_p.bind(
        _moved(images, images_at, quick.lhs_spec),
        _moved(kernel, kernel_at, quick.rhs_spec),
        dimension_numbers=quick,
        **settings,
    )
    return _moved(out, quick.out_spec, out_at)


def _moved(a: jax.Array, source: Sequence[int], target: Sequence[int]) -> jax.Array:
    """`a`, whose dimension source[i] becomes dimension target[i]."""
    return jnp.moveaxis(a, tuple(source), tuple(target))


# ---- the gradient of max pooling ---------------------------------------------------------------------------


def _can_be_tiles(images: Any, settings: dict[str, Any]) -> bool:
    """Whether the windows tile the images."""
    window, padding = settings["window_dimensions"], settings["padding"]
    are_tiles = tuple(window) == tuple(settings["window_strides"]) and not any(map(any, padding))
    is_float = jnp.issubdtype(images.dtype, jnp.floating)
    return are_tiles and is_float and 1 < math.prod(window) <= _MOST_PLACES


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
    tiles = jnp.where(is_selected, jnp.expand_dims(source, within), 0).reshape(ends)
    return lax.pad(
        tiles,
        jnp.zeros_like(tiles, shape=()),
        [(0, n - end, 0) for n, end in zip(images.shape, ends, strict=True)],
    )
