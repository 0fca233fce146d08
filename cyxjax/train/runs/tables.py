"""Reads inputs of a model from .npy, .npz and .csv files, and writes its outputs to them."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cyxjax.core.trees import PyTree, named_leaves
from cyxjax.data.formats import read_npy, read_npz, read_table
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError
from cyxjax.files import write_whole


def read_inputs(path: Path, like: PyTree, names: Sequence[str] = ()) -> PyTree:
    """The rows of `path` as the model takes them; like: one sample's inputs, shape (1, ...).

    names: the columns that the run was trained on, if known: columns of a CSV are selected by these names.

    Raises: DataError for a file that cannot be read; ConfigError for rows of a different shape or type.
    """
    found: dict[str, Any]
    if path.suffix == ".npy":
        found = {"": read_npy(path)}
    elif path.suffix == ".csv":
        found = {"": read_table(path, names)}
    else:
        found = read_npz(path)
    wanted = dict(named_leaves(like))
    if set(wanted) == {""}:
        found = {"": next(iter(found.values())) if len(found) == 1 else found.get("x")}
    rows = [_fitting(path, name, found.get(name), leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), rows)


def _fitting(path: Path, name: str, found: Any, like: Any) -> np.ndarray:
    """The array `found` in the dtype of training. Raises: ConfigError for a different shape or type, and for
    an integer that the dtype of training does not hold."""
    array, shape = np.asarray(found), like.shape[1:]
    kinds = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}.get(like.dtype.kind, like.dtype.kind)
    fits = array.shape[1:] in (shape, (math.prod(shape),)) and array.dtype.kind in kinds
    rows = array.astype(like.dtype) if fits else array
    if not fits or (like.dtype.kind in "iu" and (rows != array).any()):
        values = f" of {array.min()} to {array.max()}" if array.dtype.kind in "iu" and array.size else ""
        raise ConfigError(
            f"{path}: {name or 'x'} is {array.dtype}{list(array.shape)}{values}; the run was trained on "
            f"{like.dtype}[N{''.join(f', {n}' for n in shape)}]. HINT: prepare it like the run's data; "
            "np.savez(file, name=array, ...) for several inputs."
        )
    return rows.reshape(len(rows), *shape)


def check_columns(path: object, found: Sequence[str], trained_on: Sequence[str]) -> None:
    """Checks that columns, where both are named, have the order of training. Raises: ConfigError."""
    unnamed = [str(n) for n in range(len(trained_on))]  # as pandas numbers them
    if found and trained_on and list(found) != unnamed:
        check_names(path, "columns", found, trained_on)


def check_names(path: object, what: str, found: Sequence[str], trained_on: Sequence[str]) -> None:
    """Checks that names are those of training. Raises: ConfigError."""
    if tuple(found) != tuple(trained_on):
        raise ConfigError(
            f"{path}: its {what} are {', '.join(found) or 'numbers'}; the run was trained on "
            f"{', '.join(trained_on) or 'numbers'}, and would mistake them for these. HINT: give these, in "
            "this order."
        )


def check_vocabulary(path: object, found: str, trained_on: str) -> None:
    """Checks that characters have the numbers of training. Raises: ConfigError."""
    if found != trained_on:
        more, fewer = (
            sorted({*one} - {*other})[:20] for one, other in ((found, trained_on), (trained_on, found))
        )
        raise ConfigError(
            f"{path}: has the characters {more} that the run was not trained on, and lacks {fewer}; they are "
            "numbered by their text. HINT: a run with data.options.tokenizer reads every text."
        )


def write_outputs(path: Path, outputs: PyTree, info: DatasetInfo) -> str:
    """Writes `outputs`; returns a short description. A .csv has a column per number, and the best class.
    Types that numpy cannot read from a file, such as bfloat16, become float32.

    Raises: ConfigError for several outputs in a file other than .npz.
    """
    leaves = {
        name: leaf.astype(np.float32) if leaf.dtype.kind == "V" else leaf
        for name, leaf in named_leaves(outputs)
    }
    if path.suffix != ".npz" and len(leaves) > 1:
        raise ConfigError(f"{path}: the model has outputs {', '.join(leaves)}. HINT: name a .npz file.")
    file = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(file, **{name.replace("/", ".") or "output": leaf for name, leaf in leaves.items()})
    elif path.suffix == ".npy":
        np.save(file, *leaves.values())
    else:
        (table,) = leaves.values()
        file.write(_csv(table, info).encode())
    write_whole(path, file.getvalue())
    return ", ".join(f"{name + ' ' if name else ''}{a.dtype}{list(a.shape)}" for name, a in leaves.items())


def _csv(rows: np.ndarray, info: DatasetInfo) -> str:
    columns = rows.reshape(len(rows), -1)
    classes = info.task == "classification" and columns.shape[1] == info.num_classes > 1
    names = info.class_names if classes and len(info.class_names) == columns.shape[1] else ()
    head = [names[i] if names else f"output_{i}" for i in range(columns.shape[1])]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(["class"] if classes else []), *head])
    for row in columns:
        best = int(row.argmax())
        writer.writerow([*([names[best] if names else best] if classes else []), *row.tolist()])
    return text.getvalue()
