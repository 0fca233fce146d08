"""Which parameters no update has moved: torch's `find_unused_parameters`, a warning once."""

import warnings
from typing import Any

import numpy as np

from cyxjax.core import facade
from cyxjax.core.mesh import local_value
from cyxjax.distributed.agreement import describe

PyTree = Any


class UnusedLeaves:
    """Leaves whose gradient was zero in every update so far."""

    def __init__(self) -> None:
        self._zero: np.ndarray | None = None  # by leaf

    def names(self, params: PyTree) -> list[str]:
        """[] before the first `note`."""
        if self._zero is None:
            return []
        return [name for (name, _), unused in zip(describe(params), self._zero, strict=True) if unused]

    def note(self, mean_grads: PyTree, params: PyTree, warn: bool) -> None:
        """Counts one update; with `warn` the first one warns."""
        zero = np.asarray(local_value(facade.zero_leaves(mean_grads)))
        first, self._zero = self._zero is None, zero if self._zero is None else self._zero & zero
        if first and zero.any() and warn:
            names = ", ".join(self.names(params))
            warnings.warn(f"parameters without a gradient in the first update: {names}", stacklevel=4)
