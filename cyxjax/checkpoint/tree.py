"""A training state as named host arrays, and named host arrays as a training state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from cyxjax.checkpoint.manifest import dtype_name, is_storable
from cyxjax.errors import CheckpointError, OtherStateError

PyTree = Any
# (name, stored array, wanted leaf) -> an array of the wanted shape (for a share: its elements, flat) and
# dtype, or None to refuse the difference.
Adapt = Callable[[str, np.ndarray, Any], np.ndarray | None]
# (wanted leaf, function that reads its values) -> the leaf of the restored tree.
Put = Callable[[Any, Callable[[], np.ndarray]], Any]
_MAX_LISTED = 10


@dataclass(frozen=True, eq=False)
class HostShare:
    """The share of a leaf that one process holds: elements `start` to `stop` in C order, on the host.

    shape: of the whole leaf. is_whole: whether each process holds the whole leaf; the same on all.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    stop: int
    elements: np.ndarray
    is_whole: bool = False

    def values(self) -> np.ndarray:
        """The elements, flat."""
        return self.elements


def is_share(leaf: Any) -> TypeGuard[HostShare]:
    """Whether `leaf` is a `HostShare`, or a share of a leaf on the mesh, which has the same attributes."""
    return hasattr(leaf, "is_whole")  # arrays have no such attribute


def host_value(leaf: Any) -> np.ndarray:
    """A leaf on the host (on CPU a view, which the next step may change), or the elements of a share."""
    if is_share(leaf):
        return leaf.values()
    if not hasattr(leaf, "is_fully_replicated"):
        return np.asarray(leaf)
    return np.asarray(leaf.addressable_data(0) if leaf.is_fully_replicated else leaf)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by name, in tree order; names are paths such as `params/Dense_0/kernel`.

    Raises: CheckpointError if two leaves have one name (keys "a/b" and "a" -> "b" beside each other).
    """
    from cyxjax.core import trees  # imports jax: only when there is a state

    flat = trees.named_leaves(tree)
    named = {name or "value": leaf for name, leaf in flat}
    if len(named) != len(flat):
        raise CheckpointError(
            "Two leaves of the state have the same name. HINT: use no '/' in the keys of dicts."
        )
    return named


def host_copy(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Numpy copies of all leaves by name, which no later step can change; a HostShare for a share."""
    import jax

    # All copies off the device start before the first is waited for.
    jax.copy_to_host_async([leaf for leaf in leaves.values() if getattr(leaf, "is_fully_addressable", False)])
    return {name: _copy(leaf) for name, leaf in leaves.items()}


def refuse_unsavable(leaves: Mapping[str, Any]) -> None:
    """Raises: CheckpointError that names a leaf that is not an array of numbers."""
    import jax

    for name, leaf in leaves.items():
        is_array = is_share(leaf) or isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if not is_array or not is_storable(leaf.dtype):
            what = f"an array of dtype {leaf.dtype}" if is_array else f"a {type(leaf).__name__}"
            raise CheckpointError(
                f"State leaf {name!r} is {what}, expected an array of numbers. "
                "HINT: put it in meta; for a typed PRNG key save jax.random.key_data(key)."
            )


def differences(leaves: Mapping[str, Any], target: PyTree) -> dict[str, str]:
    """Why `target` cannot be filled from the stored `leaves`, by name of the leaf.

    leaves: arrays, or `Leaf`s of a manifest.
    """
    wanted = named_leaves(target)
    found = {name: "is wanted but not stored" for name in wanted if name not in leaves}
    found |= {name: "is stored but not wanted" for name in leaves if name not in wanted}
    for name in wanted.keys() & leaves.keys():
        stored, want = leaves[name], wanted[name]
        if (stored.shape, dtype_name(stored.dtype)) != (tuple(want.shape), dtype_name(np.dtype(want.dtype))):
            found[name] = (
                f"is stored as {stored.dtype}{list(stored.shape)}, wanted as {want.dtype}{list(want.shape)}"
            )
    return found


def refuse(unlike: Mapping[str, str]) -> None:
    """Raises: OtherStateError naming the leaves of `unlike`, unless it is empty."""
    if unlike:
        shown = [f"{name} {why}" for name, why in sorted(unlike.items())[:_MAX_LISTED]]
        raise OtherStateError(
            f"The checkpoint holds a different state: {'; '.join(shown)} ({len(unlike)} in all). "
            "HINT: continue with the model, optimizer, callbacks and comm it was saved with; or start over "
            "with its parameters: init_from: its folder, in another run_dir.",
            unlike,
        )


def _copy(leaf: Any) -> Any:
    if is_share(leaf):
        elements = leaf.values()
        if leaf.is_whole:
            return elements.reshape(leaf.shape)
        return HostShare(tuple(leaf.shape), np.dtype(leaf.dtype), leaf.start, leaf.stop, elements)
    # From a device's own memory numpy gets a copy; from that of a CPU, or of the host where a GPU's offloaded
    # state is kept, it may get a view of the buffer that donation reuses.
    on_host = getattr(getattr(leaf, "sharding", None), "memory_kind", None) == "pinned_host"
    on_cpu = not hasattr(leaf, "devices") or any(device.platform == "cpu" for device in leaf.devices())
    return np.array(host_value(leaf)) if on_host or on_cpu else host_value(leaf)
