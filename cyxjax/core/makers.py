"""Maps an array to the wrapped model that returned it: arrays have no attributes, `loss.backward()` needs it.

References are weak, and the wrapper confirms that the array is its own: ids of deleted arrays are reused.
"""

from typing import Any, Protocol
from weakref import WeakValueDictionary

import jax


class Maker(Protocol):
    """A wrapped model (`DistributedDataParallel`)."""

    def made(self, array: Any) -> bool:
        """Whether `array` is its last output, or of the parameters it last returned."""

    def loss(self, criterion: Any, output: Any, target: Any = None) -> Any:
        """The loss of its output, with `.backward()`."""

    def update_parameters(self, optimizer: Any) -> None:
        """One step of `optimizer`."""

    def zero_grad(self) -> None:
        """Forgets gradients."""


_MAKERS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def note(tree: Any, maker: Any) -> None:
    """Remembers the wrapper that made `tree`, by its first array."""
    for leaf in jax.tree.leaves(tree)[:1]:
        _MAKERS[id(leaf)] = maker


def maker_of(tree: Any) -> Maker | None:
    """The wrapper that made `tree`, or None."""
    if isinstance(tree, jax.core.Tracer):
        return None
    for leaf in jax.tree.leaves(tree)[:1]:
        maker = _MAKERS.get(id(leaf))
        return maker if maker is not None and maker.made(leaf) else None
    return None
