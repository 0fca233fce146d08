"""Maps an array to the wrapped model that returned it, for `loss.backward()`: arrays take no attributes.

References are weak, and the wrapper confirms that it made the array: ids of deleted arrays are reused.
"""

from typing import Any
from weakref import WeakValueDictionary

import jax

_MAKERS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def note(tree: Any, maker: Any) -> None:
    """Remembers the wrapper that made `tree`, by its arrays."""
    for leaf in jax.tree.leaves(tree):
        _MAKERS[id(leaf)] = maker


def maker_of(tree: Any) -> Any:
    """The wrapper that made the first array of `tree`, or None."""
    for leaf in jax.tree.leaves(tree)[:1]:
        maker = _MAKERS.get(id(leaf))
        return maker if maker is not None and maker.made(leaf) else None
    return None
