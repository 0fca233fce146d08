"""Which class has which number, from the first training on: words of later data count in this table alone."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cyxjax.data.labels import watched
from cyxjax.data.targets.classes import Names, renumbered
from cyxjax.data.targets.naming import class_names_of, refuse_words_of_no_table, with_classes
from cyxjax.errors import DataError
from cyxjax.train.feeding.fit_data import FitData, is_loader

Say = Callable[[str], None]
_SHOWN = 6


class ClassTable:
    """names: of the classes in the order of the model's outputs; () where training was on numbers; None
    before any training."""

    def __init__(self, say: Say):
        self.names: Names | None = None
        self._say, self._told = say, False

    def of_fit(self, data: FitData) -> FitData:
        """`data` whose words count in the table, or where there is none yet, as in its training data.

        Raises: DataError for a label that is none of it, and for words beside numbers.
        """
        found = class_names_of(data.train)
        if self.names == ():
            _refuse(data.train)
        names = self.names or found
        first = tuple((inputs, renumbered(targets, found, names)) for inputs, targets in data.first)
        data = data._replace(train=with_classes(data.train, names), first=first if found else data.first)
        self.tell_of_numbers("training data", data.train)
        if data.val is None:
            return data
        data = data._replace(val=_in_table(data.val, names))
        self.tell_of_numbers("validation data", data.val, names)
        return data

    def of_evaluation(self, data: Any) -> Any:
        """`data`, watched, whose words count in the table.

        Raises: DataError as `of_fit`; for words also before any training.
        """
        if self.names is None:
            _refuse(data, "nothing was trained")
            return watched(data)
        found = _in_table(data, self.names)
        self.tell_of_numbers("evaluate", found)
        return watched(found)

    def trained_on(self, data: Any) -> None:
        """From now on the table is that of the training data `data`, as `of_fit` gave them."""
        self.names = class_names_of(data) or self.names or ()

    def restore(self, stored: Names, same_data: bool) -> None:
        """Takes the table of a checkpoint; () of one that has none.

        same_data: whether the data at hand, if any, are those of the checkpoint.
        Raises: DataError where the classes counted here are others.
        """
        if self.names and stored != self.names and (stored or not same_data):
            theirs = f"counts the classes {', '.join(stored)}" if stored else "is of labels that were numbers"
            raise DataError(
                f"the checkpoint {theirs}; these data {', '.join(self.names)}. HINT: train on all classes, "
                "or begin anew (resume: never)."
            )
        self.names = stored or self.names or ()

    def tell_of_numbers(self, what: str, data: Any, names: Names = ()) -> None:
        """Says once that numbers are places in the table (or `names`), where `data` hold numbers."""
        names = names or self.names or ()
        if self._told or not names or class_names_of(data):
            return
        targets = None if is_loader(data) else data.take(np.zeros(1, np.int64))[1]
        if targets is not None and (not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iu"):
            return
        self._told = True
        shown = ", ".join(f"{n} is {name!r}" for n, name in enumerate(names[:_SHOWN]))
        self._say(
            f"WARNING: {what}: labels that are numbers count in the classes trained on, which were words: "
            f"{shown}{', ...' * (len(names) > _SHOWN)} (trainer.class_names)."
        )


def _in_table(data: Any, names: Names) -> Any:
    if not names:
        _refuse(data)
    return with_classes(data, names)


def _refuse(data: Any, trained: str = "training was on numbers") -> None:
    """Raises: DataError for words, where there is no table."""
    if found := class_names_of(data):
        refuse_words_of_no_table(found, trained)
