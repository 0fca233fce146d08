"""Convolutions in the layout that XLA computes quickly on CPUs, also inside loops.

XLA's quick convolution takes images (batch, spatial dimensions, features) and a kernel (spatial dimensions,
input features, output features). It transposes others, such as the gradient of a kernel, but only outside of
loops: inside `lax.scan` and `lax.fori_loop` they took 10 to 30 times as long. Here they are transposed when a
program is lowered, as XLA does it outside of loops: the optimized program, and so every bit, is the same
there.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from cyxjax.launch.backend.jax_private import convolution_rule

_QUICK = re.compile(
    r" dim_numbers = \[b, [\d, ]*f\]x\[[\d, ]*i, o\]->\[b, [\d, ]*f\],"
    r".*batch_group_count = 1 : i64, feature_group_count = 1 : i64"
)


@cache
def use_quick_layout() -> None:
    """From now on, convolutions in all programs that this process compiles for CPUs have the quick layout."""
    jaxs_own = convolution_rule()
    if jaxs_own is None:
        return
    quick = mlir.lower_fun(_in_quick_layout, multiple_results=False)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **settings: Any) -> Any:
        is_sharded = any(any(array.sharding.spec) for array in (*ctx.avals_in, *ctx.avals_out))
        lower = quick if not is_sharded and _can_be_quick(ctx.avals_in[0], settings) else jaxs_own
        return lower(ctx, *operands, **settings)

    mlir.register_lowering(lax.conv_general_dilated_p, rule, platform="cpu")


def has_slow_in_loops(program: str) -> bool:
    """Whether a lowered program has a convolution that is slow in a loop: in groups, or of another layout."""
    return any("stablehlo.convolution" in line and not _QUICK.search(line) for line in program.splitlines())


def _can_be_quick(images: Any, settings: dict[str, Any]) -> bool:
    """Whether the quick convolution takes it, but for the layout: one of 16 or 32 bits, without groups."""
    is_grouped = settings["feature_group_count"] * settings["batch_group_count"] > 1
    has_layout = settings["dimension_numbers"] == _quick_layout(images.ndim)
    is_short = jnp.issubdtype(images.dtype, jnp.floating) and images.dtype.itemsize <= 4
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
