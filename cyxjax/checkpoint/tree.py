"""A training state as named host arrays, and named host arrays as a training state."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from cyxjax.checkpoint.manifest import Leaf, refuse_dtype
from cyxjax.checkpoint.pieces import Share
from cyxjax.errors import CheckpointError

PyTree = Any
ToHost = Callable[[Any], np.ndarray]
# (name, stored array, wanted leaf) -> an array of the wanted shape (of a share: its elements, flat) and
# dtype, or None: refuse the difference.
Adapt = Callable[[str, np.ndarray, Any], np.ndarray | None]
# (wanted leaf, what was read of it) -> the leaf of the restored tree.
Put = Callable[[Any, np.ndarray], Any]
_MAX_LISTED = 10


class Stored(Protocol):
    """Arrays by name, read when asked for."""

    def __contains__(self, name: object) -> bool: ...
    def whole(self, name: str) -> np.ndarray: ...
    def part(self, name: str, start: int, stop: int) -> np.ndarray: ...


def as_read(want: Any, array: np.ndarray) -> np.ndarray:
    del want
    return array


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaf by name, in tree order; names are paths such as `params/Dense_0/kernel`.

    Raises: CheckpointError if two leaves have one name (keys "a/b" and "a" -> "b" beside each other).
    """
    from cyxjax.core import trees  # and jax: not before there is a state to look at

    flat = trees.named_leaves(tree)
    named = {name or "value": leaf for name, leaf in flat}
    if len(named) != len(flat):
        raise CheckpointError(
            "Two leaves of the state have the same name. HINT: use no '/' in the keys of dicts."
        )
    return named


def host_copy(state: PyTree, to_host: ToHost, *, keep: bool) -> dict[str, np.ndarray]:
    """Numpy copies of all leaves by name, which no later step can change; {} on a process that keeps none.

    Replicated leaves are read from this process's first shard. Leaves spread over several processes go
    through `to_host`, which is called in tree order on every process, `keep` or not: it may be collective.
    """
    leaves = named_leaves(state)
    for name, leaf in leaves.items():
        _refuse_not_an_array(name, leaf)
    if keep:
        _start_transfers(leaves.values())
    copies = {name: _copy(leaf, to_host, keep) for name, leaf in leaves.items()}
    return {name: array for name, array in copies.items() if array is not None}


def _unlike(stored: Leaf, want: Any) -> str:
    return f"is stored as {stored.dtype}{list(stored.shape)}, wanted as {want.dtype}{list(want.shape)}"


def refuse_spread(leaf: Any) -> np.ndarray:
    """The default `to_host`: it has no way to reach other processes' shards and says so."""
    raise CheckpointError(
        f"A state leaf of shape {leaf.shape} is spread over several processes ({leaf.sharding}). "
        "HINT: give Checkpointer a to_host that gathers it on every process."
    )


def differences(leaves: Mapping[str, Leaf], target: PyTree, *, part: bool) -> dict[str, str]:
    """Why leaves of `target` cannot be filled from `leaves` as stored, by name. `part`: extras are fine."""
    wanted = named_leaves(target)
    found = {name: "is wanted but not stored" for name in wanted if name not in leaves}
    if not part:
        found |= {name: "is stored but not wanted" for name in leaves if name not in wanted}
    for name in wanted.keys() & leaves.keys():
        stored, want = leaves[name], wanted[name]
        have = (stored.shape, stored.dtype)
        if have != (tuple(want.shape), np.dtype(want.dtype).name):
            found[name] = _unlike(stored, want)
    return found


def fill(
    target: PyTree, stored: Stored, adapt: Adapt | None, unlike: Mapping[str, str], put: Put = as_read
) -> PyTree:
    """`target`'s tree with leaves from `stored`, one in memory at a time; those in `unlike` through `adapt`.

    Raises: CheckpointError that lists every leaf `adapt` does not settle, before another is read.
    """
    import jax

    wanted = named_leaves(target)
    refused = {name: why for name, why in unlike.items() if name not in wanted}  # no adapting these
    adapted: dict[str, np.ndarray] = {}
    for name in (name for name in wanted if name in unlike):
        array = _adapted(name, stored, wanted[name], adapt)
        if array is None:
            refused[name] = unlike[name]
        else:
            adapted[name] = array
    refuse(refused)
    filled = []
    for name, want in wanted.items():
        array = adapted.pop(name) if name in adapted else _own(name, stored, want)
        filled.append(put(want, array))
    return jax.tree.unflatten(jax.tree.structure(target), filled)


def _own(name: str, stored: Stored, want: Any) -> np.ndarray:
    """What this process wants of a leaf: all, or flat the elements of its share."""
    return stored.part(name, want.start, want.stop) if isinstance(want, Share) else stored.whole(name)


def refuse(unlike: Mapping[str, str]) -> None:
    """Raises: CheckpointError naming the leaves of `unlike`, unless it is empty."""
    if not unlike:
        return
    shown = [f"{name} {why}" for name, why in sorted(unlike.items())[:_MAX_LISTED]]
    if len(unlike) > _MAX_LISTED:
        shown.append(f"and {len(unlike) - _MAX_LISTED} more")
    raise CheckpointError(
        "The checkpoint is of another state: " + "; ".join(shown) + ". "
        "HINT: restore with the model and optimizer it was saved with, or allow the change."
    )


def cast(name: str, stored: np.ndarray, want: Any) -> np.ndarray | None:
    """An `adapt` that allows another dtype of the same shape, and nothing else."""
    del name
    return stored.astype(want.dtype) if stored.shape == tuple(want.shape) else None


def _adapted(name: str, stored: Stored, want: Any, adapt: Adapt | None) -> np.ndarray | None:
    if adapt is None or name not in stored:
        return None
    array = adapt(name, stored.whole(name), want)
    shape = (want.stop - want.start,) if isinstance(want, Share) else tuple(want.shape)
    if array is not None and (array.shape, array.dtype) != (shape, np.dtype(want.dtype)):
        raise CheckpointError(
            f"{name}: adapt gave {array.dtype}{list(array.shape)} for {want.dtype}{list(shape)}. "
            "HINT: adapt returns the wanted shape and dtype, or None."
        )
    return array


def _refuse_not_an_array(name: str, leaf: Any) -> None:
    import jax

    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise CheckpointError(
            f"State leaf {name!r} is a {type(leaf).__name__}, not an array. "
            "HINT: wrap it in jnp.asarray or put it in meta."
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise CheckpointError(
            f"State leaf {name!r} is a typed PRNG key. HINT: save jax.random.key_data(key)."
        )
    refuse_dtype(name, leaf.dtype)


def _start_transfers(leaves: Any) -> None:
    """Start all copies off the device before waiting for the first."""
    for leaf in leaves:
        if hasattr(leaf, "copy_to_host_async") and leaf.is_fully_addressable:
            leaf.copy_to_host_async()


def _copy(leaf: Any, to_host: ToHost, keep: bool) -> np.ndarray | None:
    if not hasattr(leaf, "is_fully_replicated"):
        return np.array(leaf) if keep else None
    if leaf.is_fully_replicated:
        return _detached(leaf.addressable_shards[0].data) if keep else None
    if leaf.is_fully_addressable:
        return _detached(leaf) if keep else None
    # Collective: every process takes part, whoever keeps the result.
    whole = to_host(leaf)
    return np.array(whole) if keep else None


def _detached(leaf: Any) -> np.ndarray:
    """A host array that no later step can change."""
    # From a CPU device numpy gets a view of the very buffer that donation reuses; from others, a copy.
    on_cpu = any(device.platform == "cpu" for device in leaf.devices())
    return np.array(leaf) if on_cpu else np.asarray(leaf)
