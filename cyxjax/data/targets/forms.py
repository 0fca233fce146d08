"""Labels that a loss of classes does not take as they are: yes and no, and one-hot rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cyxjax.core.losses import BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, L1Loss, MSELoss, NLLLoss
from cyxjax.data.labels import WatchedDataset, WatchedLoader
from cyxjax.data.sources import ArrayDataset, Subset
from cyxjax.data.targets.naming import class_names_of
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
    both = len(names) == 2 and isinstance(given, BCEWithLogitsLoss)  # no and yes: 0 and 1
    if names and not both and isinstance(given, MSELoss | L1Loss | HuberLoss | BCEWithLogitsLoss):
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
