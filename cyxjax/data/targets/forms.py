"""Labels that a loss of classes does not take as they are: yes and no, and one-hot rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cyxjax.core.losses import BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, L1Loss, MSELoss, NLLLoss
from cyxjax.data.files import Subset
from cyxjax.data.labels import WatchedDataset, WatchedLoader
from cyxjax.data.sources import ArrayDataset
from cyxjax.data.targets.classes import Names, renumbered
from cyxjax.errors import DataError

Form = Callable[[np.ndarray], np.ndarray]
"""Targets as they are read -> labels."""


def form_of(loss: Any, targets: Any, output: Callable[[], Any]) -> Form | None:
    """How targets such as these few become the labels that `loss` takes; None where they are as they should.

    output: the shape of what the model gives for a sample; asked for only where it counts.
    """
    given = getattr(loss, "__self__", loss)  # a loss is carried as its method
    if not isinstance(given, CrossEntropyLoss | NLLLoss) or not isinstance(targets, np.ndarray):
        return None
    hot = targets.ndim > 1 and targets.shape[-1] > 1 and _is_one_hot(targets)
    # Of float rows the weights of classes mean something else than of labels: torch's rule for them stays.
    soft = targets.dtype.kind == "f" and getattr(given, "weight", None) is not None
    if not (targets.dtype.kind == "b" or hot) or soft:
        return None
    shape = getattr(output(), "shape", (0,))[1:]
    if targets.dtype.kind == "b" and targets.shape[1:] == shape[:-1]:
        return _whole_numbers
    return _from_one_hot if targets.shape[1:] == shape else None


def refuse_words(data: Any, loss: Any) -> None:
    """Raises: DataError for words that a loss of quantities would take for numbers."""
    given, names = getattr(loss, "__self__", loss), class_names_of(data)
    if names and isinstance(given, MSELoss | L1Loss | HuberLoss | BCEWithLogitsLoss):
        raise DataError(
            f"the targets are words, such as {names[0]!r}, and {type(given).__name__} compares quantities. "
            "HINT: CrossEntropyLoss takes them as classes; a number written as text is float(text)."
        )


def with_form(data: Any, form: Form) -> Any:
    """`data` with labels in place of its targets: arrays at once, what is read as it is read."""
    if isinstance(data, Subset):
        return Subset(with_form(data.dataset, form), data.rows)
    if isinstance(data, ArrayDataset):
        if np.asarray(data.targets).dtype.kind == "f" and not _is_one_hot(np.asarray(data.targets)):
            return data  # probabilities, some of them 0 and 1
        return ArrayDataset(data.inputs, form(np.asarray(data.targets)), data.class_names)
    if isinstance(data, WatchedDataset | WatchedLoader):
        data.form = form
    return data


def with_classes(data: Any, names: Names) -> Any:
    """`data`, whose labels count in `names` where it names its own. Raises: DataError for another class."""
    if isinstance(data, Subset):
        return Subset(with_classes(data.dataset, names), data.rows)
    if not isinstance(data, ArrayDataset) or data.class_names in ((), names) or not names:
        return data
    return ArrayDataset(data.inputs, renumbered(data.targets, data.class_names, names), names)


def refuse_unnumbered(data: Any, trained: Any) -> None:
    """Raises: DataError for words, where the data `trained` on hold numbers: which is which nobody says."""
    names = class_names_of(data)
    if names and _are_numbers(trained):
        refuse_words_of_no_table(names)


def refuse_words_of_no_table(names: Names) -> None:
    """Raises: DataError for words, `names`, that were not trained on."""
    raise DataError(
        f"the labels are words, such as {names[0]!r}, and training was on numbers: there is no table of "
        "classes. HINT: train with the words, or pass the numbers."
    )


def _are_numbers(data: Any) -> bool:
    """Whether all labels of `data` are known to be numbers of classes, or one-hot rows, without names."""
    if isinstance(data, Subset):
        return _are_numbers(data.dataset)
    if not isinstance(data, ArrayDataset) or data.class_names or not isinstance(data.targets, np.ndarray):
        return False
    return data.targets.dtype.kind in "biu" or (data.targets.ndim > 1 and _is_one_hot(data.targets))


def class_names_of(data: Any) -> Names:
    """The names of the classes that the labels of `data` count in; () where it does not name them."""
    if isinstance(data, Subset):
        return class_names_of(data.dataset)
    return data.class_names if isinstance(data, ArrayDataset) else ()


def _is_one_hot(targets: np.ndarray) -> bool:
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(-1) == 1).all())


def _whole_numbers(targets: np.ndarray) -> np.ndarray:
    return targets.astype(np.int32)


def _from_one_hot(targets: np.ndarray) -> np.ndarray:
    if not _is_one_hot(targets):
        rows = (((targets != 0) & (targets != 1)).any(-1) | (targets.sum(-1) != 1)).reshape(len(targets), -1)
        first = int(np.flatnonzero(rows.any(1))[0])
        raise DataError(
            f"sample {first} is {targets[first].tolist()} and others are one-hot rows, a class each. HINT: "
            "for several classes a sample use BCEWithLogitsLoss, for probabilities floats."
        )
    return targets.argmax(-1).astype(np.int32)
