"""A model's layers as a table for people: shapes are traced, nothing is computed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cyxjax.models.layers import Layer


def summary_table(layers: Sequence[Layer], names: Sequence[str], input_shape: tuple[int, ...] | None) -> str:
    """One line per layer with its number of parameters and, given one sample's shape, its output shape.

    Raises: DataError where a layer cannot take what the one before it gives.
    """
    header = ["layer", "output", "params"]
    shapes = _output_shapes(layers, input_shape) if input_shape is not None else [""] * len(layers)
    counts = [count_params(jax.eval_shape(one.init, jax.random.key(0))[0]) for one in layers]
    rows = [[name, shape, f"{count:,}"] for name, shape, count in zip(names, shapes, counts, strict=True)]
    table = [header, *rows, ["total", "", f"{sum(counts):,}"]]
    columns = (0, 1, 2) if input_shape is not None else (0, 2)
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join(_line(row, widths, columns) for row in table)


def _output_shapes(layers: Sequence[Layer], input_shape: tuple[int, ...]) -> list[str]:
    # Ids for an embedding, numbers for everything else.
    is_ids = bool(layers) and layers[0].kind == "embedding"
    x = jax.ShapeDtypeStruct((1, *input_shape), jnp.int32 if is_ids else jnp.float32)
    shapes = []
    for one in layers:
        x = jax.eval_shape(lambda x, one=one: _run(one, x), x)
        shapes.append(f"({', '.join(['B', *map(str, x.shape[1:])])})")
    return shapes


def _run(one: Layer, x: jax.Array) -> jax.Array:
    key = jax.random.key(0)
    return one.apply(*one.init(key), x, key, False)[0]


def _line(row: list[str], widths: list[int], columns: tuple[int, ...]) -> str:
    cells = [row[c].rjust(widths[c]) if c == 2 else row[c].ljust(widths[c]) for c in columns]
    return "  ".join(cells)


def count_params(params: Any) -> int:
    """The number of numbers in a pytree of arrays (or of `jax.eval_shape`'s shapes)."""
    import jax  # here, not above: naming a model must not start jax

    return sum(leaf.size for leaf in jax.tree.leaves(params))
