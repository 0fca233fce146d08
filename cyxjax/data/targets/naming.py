"""Which class each label of a data set names, and data whose labels count in another table."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cyxjax.data.labels import WatchedDataset, WatchedLoader
from cyxjax.data.loader import DataLoader
from cyxjax.data.sources import ArrayDataset, Dataset, Subset
from cyxjax.data.targets.classes import Names, renumbered
from cyxjax.errors import DataError


@dataclass(frozen=True)
class NamedDataset:
    """Samples that are not arrays in memory, whose labels count in `class_names`."""

    dataset: Dataset
    class_names: Names
    found: Names = ()  # what they count in as they are read; (): the same

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """As of the dataset. Raises: DataError for a label of a class that is not in the table."""
        inputs, targets = self.dataset.take(indices)
        return inputs, renumbered(targets, self.found or self.class_names, self.class_names)


def class_names_of(data: Any) -> Names:
    """The names of the classes that the labels of `data` count in; () where it does not name them."""
    if isinstance(data, Subset | WatchedDataset | DataLoader):
        return class_names_of(data.dataset)
    if isinstance(data, WatchedLoader):
        return class_names_of(data.loader) if data.class_names is None else data.class_names
    found = getattr(data, "class_names", ())
    return found if type(found) is tuple else ()


def with_classes(data: Any, names: Names) -> Any:
    """`data`, whose labels count in `names` where it names its own.

    Raises: DataError for a label of another class; of what is read by item or batch, as it is read.
    """
    found = class_names_of(data)
    if found in ((), names) or not names:
        return data
    if isinstance(data, Subset):
        return Subset(with_classes(data.dataset, names), data.rows)
    if isinstance(data, WatchedDataset):
        return WatchedDataset(with_classes(data.dataset, names))
    if isinstance(data, ArrayDataset):
        return ArrayDataset(data.inputs, renumbered(data.targets, found, names), names)
    if isinstance(data, Dataset):
        return NamedDataset(data, names, found)
    kept = WatchedLoader(getattr(data, "loader", data))
    kept.class_names, kept.form = names, lambda labels: renumbered(labels, found, names)
    return kept


def with_names(data: Dataset, names: Names) -> Dataset:
    """`data`, whose labels are numbers of the classes `names`."""
    if not names or class_names_of(data):
        return data
    if isinstance(data, Subset):
        return Subset(with_names(data.dataset, names), data.rows)
    return replace(data, class_names=names) if isinstance(data, ArrayDataset) else NamedDataset(data, names)


def refuse_words_of_no_table(names: Names, trained: str = "training was on numbers") -> None:
    """Raises: DataError for words, `names`, that were not trained on."""
    raise DataError(
        f"the labels are words, such as {names[0]!r}, and {trained}: there is no table of classes. "
        "HINT: train with the words, or pass the numbers."
    )
