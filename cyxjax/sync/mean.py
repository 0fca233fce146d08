"""The plain strategy: every gradient averaged in its own dtype, as DDP does."""

import optax

from cyxjax.core.replica import pmean
from cyxjax.core.strategy import Reducer, Sync, reduce_then
from cyxjax.sync.entry import Exchange, Strategy


def mean_reducer() -> Reducer:
    """Averages gradients over axis `data`. Stateless; how leaves share a transfer: `core/exchange.py`."""
    return optax.stateless(lambda grads, params: pmean(grads))


def mean(optimizer: optax.GradientTransformation) -> Sync:
    return reduce_then(mean_reducer(), optimizer)


ENTRIES = {
    "mean": Strategy(
        mean,
        ("about 2P(R-1)/R, in one exchange", "none", "the default: one machine, a fast network"),
        learns=None,  # the others are compared with it
        sends=lambda params, size: [Exchange(True, size)],
        in_memory_plan=True,
    )
}
