"""The optimizer's state in the host's memory between steps; the compiled step moves it in and out.

kept on the host -> fetched, a leaf where the update reads it -> update -> stowed on the host

What is moved is all of a strategy's state that is more than a number a replica: moments, residuals, averages.
On CPU the host's memory is the devices': the program is the same, and nothing is saved.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from cyxjax.core.mesh import HOST_MEMORY, PER_REPLICA
from cyxjax.core.replica import by_spec
from cyxjax.core.strategy import Sync
from cyxjax.errors import ConfigError

PyTree = Any


def with_offload(sync: Sync, mesh: Mesh, what: str = "optimizer") -> Sync:
    """`sync` whose state is kept in the host's memory. what: optimizer; none: `sync` as it is.

    The same numbers. Raises: ConfigError where a device has no memory of the host's.
    """
    if what == "none":
        return sync
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ConfigError(
            f"offload={what!r} keeps the optimizer's state in {HOST_MEMORY} memory, and {device.device_kind} "
            f"has {', '.join(kinds)}. HINT: offload: none; comm: zero1 cuts the state over replicas.",
            key="offload",
        )

    def moved_to(kind: str) -> Any:
        def one(leaf: Any, spec: Any) -> Any:
            place = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.device_put(leaf, place) if is_moved(leaf, spec) else leaf

        return lambda state: state._replace(sync=by_spec(one, state.sync, sync.state_spec))

    return sync._replace(fetch=moved_to(device.default_memory().kind), stow=moved_to(HOST_MEMORY))


def is_moved(leaf: Any, spec: Any) -> bool:
    """Whether a leaf of a strategy's state goes to the host: counters and factors stay, hooks read them."""
    return math.prod(leaf.shape[1:] if spec == PER_REPLICA else leaf.shape) > 1
