"""Labels that are words or categories: which class has which number."""

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cyxjax.errors import DataError

Names = tuple[str, ...]
_SHOWN = 8


def named_labels(values: Any) -> tuple[np.ndarray, Names] | None:
    """(int32 labels, names of the classes) of words or categories; None for anything else.

    Classes are numbered in the order of their names; categories (pandas) in their own.
    Raises: DataError naming a sample without a label.
    """
    for lacks in ("isna", "is_null"):  # a series of pandas, of polars
        if hasattr(values, lacks):
            _refuse_missing(np.asarray(getattr(values, lacks)()))
    categories = getattr(values, "cat", values)  # of a pandas series
    if hasattr(categories, "codes") and hasattr(categories, "categories"):
        codes = np.asarray(categories.codes, np.int32)
        _refuse_missing(codes < 0)
        return codes, tuple(map(str, categories.categories))
    if hasattr(values, "detach") or not (hasattr(values, "dtype") or isinstance(values, list)):
        return None  # tensors hold numbers
    try:
        array = np.asarray(values)
    except ValueError:  # ragged: said where arrays are made
        return None
    words = _words(array)
    if words is None:
        return None
    names, numbers = np.unique(words, return_inverse=True)
    return numbers.reshape(words.shape).astype(np.int32), tuple(names.tolist())


def _words(array: np.ndarray) -> np.ndarray | None:
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    if array.dtype.kind in "UT":
        return np.array(array.tolist())
    if array.dtype.kind != "O" or not any(isinstance(one, str) for one in array.flat):
        return None
    others = np.array([not isinstance(one, str) for one in array.flat]).reshape(array.shape)
    for place in np.argwhere(others):  # a NaN, or pandas' own, is not equal to itself
        one = array[tuple(place)]
        if not (one is None or type(one).__name__ in ("NAType", "NaTType") or one != one):
            word = next(word for word in array.flat if isinstance(word, str))
            raise DataError(
                f"labels are words, such as {word!r}, and sample {place[0]} has {one!r}, "
                f"a {type(one).__name__}. HINT: make all words, [str(one) for one in y], or all numbers."
            )
    _refuse_missing(others)
    return array.astype(str)


def _refuse_missing(missing: np.ndarray) -> None:
    if missing.any():
        raise DataError(
            f"{int(missing.sum())} of {len(missing)} samples have no label, the first is "
            f"{int(np.argwhere(missing)[0][0])}. HINT: leave them out, X[keep], y[keep]; of pandas "
            "keep = y.notna()."
        )


def renumbered(labels: np.ndarray, found: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """`labels` that count in `found` as they count in `names`. Raises: DataError for a class of no name."""
    if found == names:
        return labels
    places = {name: place for place, name in enumerate(names)}
    numbers = np.array([places.get(name, -1) for name in found], np.int32)[labels]
    if numbers.size and numbers.min() < 0:
        strange = found[int(labels[numbers < 0][0])]
        close = difflib.get_close_matches(strange, names, 1)
        shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
        raise DataError(
            f"label {strange!r} is none of the {len(names)} classes trained on ({shown}). HINT: "
            + (f"did you mean {close[0]!r}?" if close else "leave its samples out, or train with them.")
        )
    return numbers
