"""A training state as named host arrays, and named host arrays as a training state."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cyxjax.checkpoint.manifest import Leaf, refuse_dtype
from cyxjax.checkpoint.pieces import HostShare, host_value, is_share
from cyxjax.errors import CheckpointError, OtherStateError

PyTree = Any
# (name, stored array, wanted leaf) -> an array of the wanted shape (of a share: its elements, flat) and
# dtype, or None: refuse the difference.
Adapt = Callable[[str, np.ndarray, Any], np.ndarray | None]
# (wanted leaf, what reads its values) -> the leaf of the restored tree.
Put = Callable[[Any, Callable[[], np.ndarray]], Any]
_MAX_LISTED = 10


def as_read(want: Any, read: Callable[[], np.ndarray]) -> np.ndarray:
    del want
    return read()


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


def host_copy(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Numpy copies of all leaves by name, which no later step can change; of a share, a HostShare."""
    _start_transfers(leaves.values())
    return {name: _copy(leaf) for name, leaf in leaves.items()}


def copy_of_shares(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`host_copy` for a process that writes its shares alone: of other leaves only what they look like."""
    import jax

    described = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
    return {name: _copy(leaf) if is_share(leaf) else described(leaf) for name, leaf in leaves.items()}


def refuse_unsavable(leaves: Mapping[str, Any]) -> None:
    """Raises: CheckpointError naming a leaf that is no array of numbers, or that nobody cut into shares."""
    for name, leaf in leaves.items():
        _refuse_not_an_array(name, leaf)


def _unlike(stored: Leaf, want: Any) -> str:
    return f"is stored as {stored.dtype}{list(stored.shape)}, wanted as {want.dtype}{list(want.shape)}"


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


def refuse(unlike: Mapping[str, str]) -> None:
    """Raises: OtherStateError naming the leaves of `unlike`, unless it is empty."""
    if not unlike:
        return
    shown = [f"{name} {why}" for name, why in sorted(unlike.items())[:_MAX_LISTED]]
    if len(unlike) > _MAX_LISTED:
        shown.append(f"and {len(unlike) - _MAX_LISTED} more")
    raise OtherStateError(
        "The checkpoint is of another state: " + "; ".join(shown) + ". "
        "HINT: continue with the model, optimizer, callbacks and comm it was saved with; or start over with "
        "its parameters: init_from: its folder, in another run_dir.",
        unlike,
    )


def cast(name: str, stored: np.ndarray, want: Any) -> np.ndarray | None:
    """An `adapt` that allows another dtype of the same shape, and nothing else."""
    del name
    return stored.astype(want.dtype) if stored.shape == tuple(want.shape) else None


def _refuse_not_an_array(name: str, leaf: Any) -> None:
    import jax

    if not isinstance(leaf, jax.Array | np.ndarray | np.generic) and not is_share(leaf):
        raise CheckpointError(
            f"State leaf {name!r} is a {type(leaf).__name__}, not an array. "
            "HINT: wrap it in jnp.asarray or put it in meta."
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise CheckpointError(
            f"State leaf {name!r} is a typed PRNG key. HINT: save jax.random.key_data(key)."
        )
    refuse_dtype(name, leaf.dtype)
    refuse_spread(name, leaf)


def refuse_spread(name: str, leaf: Any) -> None:
    """Raises: CheckpointError for a jax.Array of which other processes hold parts."""
    if not getattr(leaf, "is_fully_addressable", True) and not leaf.is_fully_replicated:
        raise CheckpointError(
            f"State leaf {name!r} of shape {leaf.shape} is spread over several processes ({leaf.sharding}). "
            "HINT: give the Share that this process holds (cyxjax.core.portable)."
        )


def _start_transfers(leaves: Any) -> None:
    """Start all copies off the device before waiting for the first."""
    for leaf in leaves:
        if hasattr(leaf, "copy_to_host_async") and leaf.is_fully_addressable:
            leaf.copy_to_host_async()


def _copy(leaf: Any) -> Any:
    if is_share(leaf):
        return host_value(leaf).reshape(leaf.shape) if leaf.is_whole else HostShare.of(leaf)
    # From a CPU device numpy gets a view of the very buffer that donation reuses; from others, a copy.
    is_copied = hasattr(leaf, "devices") and all(device.platform != "cpu" for device in leaf.devices())
    return host_value(leaf) if is_copied else np.array(host_value(leaf))
