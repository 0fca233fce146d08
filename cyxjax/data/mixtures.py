"""Several data sets as one, each with a share of the samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cyxjax.data.columns import map_leaves
from cyxjax.data.sources import Dataset, as_dataset
from cyxjax.errors import ConfigError

_STEP = (5**0.5 - 1) / 2  # of the golden ratio: any stretch holds the shares to within a few samples


class Mixture:
    """A `Dataset` of `num_samples` samples (default: all lengths together), a share of `weights` from each.

    Sample i is always the same one: which data set is a function of i, and within it they are taken in turn,
    from the start again where a small one has run out. So it resumes, audits and shuffles as any data set.
    Raises: ConfigError for weights that are no shares.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], num_samples: int | None = None):
        self._parts: list[Dataset] = [as_dataset(one) for one in datasets]
        shares = np.asarray(weights, np.float64)
        if len(shares) != len(self._parts) or not len(shares) or not (shares > 0).all():
            raise ConfigError(
                f"{len(self._parts)} data sets, weights {list(weights)}: expected a positive one for each. "
                "HINT: Mixture([a, b], [3, 1])."
            )
        self._length = sum(map(len, self._parts)) if num_samples is None else num_samples
        edges = np.cumsum(shares / shares.sum())[:-1]
        which = np.searchsorted(edges, np.arange(self._length) * _STEP % 1.0, side="right")
        self._which = which.astype(np.int16)
        self._turn = np.empty(self._length, np.int64)
        for number in range(len(self._parts)):
            mine = np.flatnonzero(which == number)
            self._turn[mine] = np.arange(len(mine)) % len(self._parts[number])

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """(inputs, targets) of `indices`."""
        which, places, rows = self._which[indices], [], []
        for number in np.unique(which):
            mine = np.flatnonzero(which == number)
            places.append(mine)
            rows.append(self._parts[number].take(self._turn[np.asarray(indices)[mine]]))
        back = np.argsort(np.concatenate(places))
        inputs, targets = (
            map_leaves(lambda *leaves: np.concatenate(leaves)[back], *(one[part] for one in rows))
            for part in (0, 1)
        )
        return inputs, targets
