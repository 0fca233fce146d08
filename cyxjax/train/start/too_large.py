"""A model larger than the memory it would be drawn in is refused first: a host would swap for hours."""

import math
import os
from typing import Any

import jax
from jax.sharding import Mesh

from cyxjax.core.mesh import local_replicas
from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError

PyTree = Any


def refuse_too_large(params: PyTree, mesh: Mesh, *, in_parts: bool) -> None:
    """params: shapes. in_parts: replicas hold a part each. Raises: ConfigError naming the largest leaf."""
    sizes = {name: math.prod(leaf.shape) * leaf.dtype.itemsize for name, leaf in named_leaves(params)}
    here = len(local_replicas(mesh))
    need = sum(sizes.values()) * (here / mesh.size if in_parts else 1)
    have = _memory_bytes(mesh.devices.flat[local_replicas(mesh)[0]], here if in_parts else 1)
    if have is None or need <= have:
        return
    largest = max(sizes, key=sizes.__getitem__)
    raise ConfigError(
        f"the model's parameters take {need / 1e9:,.1f} GB {'here ' if in_parts else ''}and there are "
        f"{have / 1e9:,.1f}; the largest is {largest} of {sizes[largest] / 1e9:,.1f}. HINT: make it smaller "
        "(model.options), or cut it over more hosts with comm='fsdp'.",
        key="model.options",
    )


def _memory_bytes(device: Any, count: int) -> float | None:
    """Of the host for a CPU, of so many devices else; None where it is not known."""
    if device.platform == "cpu":
        try:
            return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError):
            return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit) * count


def shapes_of(fns: Any, inputs: PyTree) -> PyTree:
    """The parameters' shapes; nothing is drawn."""
    return jax.eval_shape(fns.init, jax.random.key(0), inputs)[0]
