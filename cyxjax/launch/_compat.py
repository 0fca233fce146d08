"""Everything we use of jax and jaxlib that is not public, in one place; one contract test per version."""

import sys

from cyxjax.errors import GroupError


def refuse_started_backend() -> None:
    """Raises GroupError when jax has devices already: it would ignore the group and train alone."""
    if "jax" not in sys.modules:
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise GroupError(
            "jax has started its devices before the group was formed. "
            "HINT: call cyxjax.distributed.init() first, before any array is made or jax.devices() is asked."
        )


def leave(timeout_s: float) -> None:
    """Waits for the other ranks, then shuts jax.distributed down; nothing to do when it never started."""
    if "jax" not in sys.modules:
        return
    import jax
    from jax._src import distributed

    if distributed.global_state.client is None:
        return
    distributed.global_state.client.wait_at_barrier("cyxjax/leave", int(timeout_s * 1000))
    jax.distributed.shutdown()
