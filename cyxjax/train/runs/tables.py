"""Reads inputs of a model from .npy, .npz and .csv files, and writes its outputs to them."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cyxjax.core.trees import named_leaves
from cyxjax.data.columns import rows_not_finite
from cyxjax.data.formats import read_npy, read_npz, read_table
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError, DataError
from cyxjax.files import write_whole

PyTree = Any


def read_inputs(path: Path, like: PyTree, names: Sequence[str] = ()) -> PyTree:
    """The rows of `path` as the model takes them; like: one sample's inputs, shape (1, ...).

    names: of the columns the run was trained on, where known: a CSV's are taken by these.

    Raises: DataError for a file that cannot be read or holds NaN; ConfigError for rows of another kind.
    """
    if path.suffix == ".npy":
        found = {"": read_npy(path)}
    elif path.suffix == ".csv":
        found = {"": read_table(path, names)}
    else:
        found = read_npz(path)
    wanted = dict(named_leaves(like))
    if set(wanted) == {""} and len(found) == 1:
        found = {"": next(iter(found.values()))}
    elif set(wanted) == {""}:
        found = {"": found["x"]} if "x" in found else found
    if found.keys() != wanted.keys():
        names = ", ".join(name or "x" for name in wanted)
        raise ConfigError(
            f"{path} holds {', '.join(name or 'one array' for name in found)}, the model takes {names}. "
            "HINT: np.savez(file, name=array, ...)."
        )
    rows = [_fitting(path, name, found[name], leaf) for name, leaf in wanted.items()]
    if len({len(array) for array in rows}) > 1:
        raise ConfigError(
            f"{path}: inputs of {sorted({len(a) for a in rows})} rows. HINT: one row a sample in each."
        )
    return jax.tree.unflatten(jax.tree.structure(like), rows)


def check_columns(path: object, found: Sequence[str], trained_on: Sequence[str]) -> None:
    """Checks that columns have the order of training. Raises: ConfigError naming the first that has not."""
    if list(found) == [str(n) for n in range(len(trained_on))]:  # pandas numbers what it knows no names of
        return
    pairs = enumerate(zip(found, trained_on, strict=False), 1)
    at, other, mine = next(((n, a, b) for n, (a, b) in pairs if a != b), (0, "", ""))
    if at:
        raise ConfigError(
            f"{path}: column {at} of the inputs is {other!r}, the run was trained on {mine!r} "
            f"there. HINT: write the columns in the order {', '.join(trained_on)}."
        )


def check_classes(path: object, found: Sequence[str], trained_on: Sequence[str]) -> None:
    """Checks that the class names are those of training. Raises: ConfigError where they differ."""
    if found and trained_on and tuple(found) != tuple(trained_on):
        raise ConfigError(
            f"{path}: its classes are {', '.join(found)}; the run was trained on {', '.join(trained_on)}: "
            "the same label means another class. HINT: give samples of each of these classes."
        )


def _fitting(path: Path, name: str, array: np.ndarray, like: Any) -> np.ndarray:
    """`array` in the dtype the model was trained with. Raises: ConfigError where that is another kind."""
    shape = (len(array) if array.ndim else 0, *like.shape[1:])
    kinds = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}.get(like.dtype.kind, like.dtype.kind)
    flat = array.ndim == 2 and array.shape[0] and array.shape[1] == int(np.prod(like.shape[1:]))
    if (array.shape != shape and not flat) or array.dtype.kind not in kinds:
        raise ConfigError(
            f"{path}{': ' + name if name else ''}: {array.dtype}{list(array.shape)}; the run was trained on "
            f"{like.dtype}[N{''.join(f', {n}' for n in like.shape[1:])}]. HINT: prepare it as its data were."
        )
    rows = np.asarray(array).reshape(shape).astype(like.dtype)
    if (bad := rows_not_finite(rows)).size:
        raise DataError(
            f"{path}{': ' + name if name else ''}: {bad.size} of {len(rows)} rows hold NaN or infinity, the "
            f"first is row {bad[0]}, counted from 0; training takes none. HINT: fill them, or leave them out."
        )
    return rows


def write_outputs(path: Path, outputs: PyTree, info: DatasetInfo) -> str:
    """Writes `outputs` and says in a few words what. A .csv holds a column a number, and of classes the best.

    Raises: ConfigError for outputs that the format cannot hold, DataError for NaN where a class is asked for.
    """
    leaves = dict(named_leaves(outputs))
    whole = next(iter(leaves.values()))
    file = io.BytesIO()
    if path.suffix == ".npz":
        np.savez(file, **{name.replace("/", ".") or "output": leaf for name, leaf in leaves.items()})
    elif len(leaves) > 1:
        raise ConfigError(f"{path}: the model has outputs {', '.join(leaves)}. HINT: name a .npz file.")
    elif path.suffix == ".npy":
        np.save(file, whole)
    else:
        file.write(_csv(path, whole, info).encode())
    write_whole(path, file.getvalue())
    return ", ".join(f"{name + ' ' if name else ''}{a.dtype}{list(a.shape)}" for name, a in leaves.items())


def _csv(path: Path, rows: np.ndarray, info: DatasetInfo) -> str:
    if rows.ndim > 2:
        raise ConfigError(
            f"{path}: an output of shape {list(rows.shape)} is no table. HINT: name a .npy file."
        )
    columns = rows.reshape(len(rows), -1)
    classes = info.task == "classification" and columns.shape[1] == info.num_classes > 1
    names = info.class_names if classes and len(info.class_names) == columns.shape[1] else ()
    head = [names[i] if names else f"output_{i}" for i in range(columns.shape[1])]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*(["class"] if classes else []), *head])
    if classes and (bad := np.flatnonzero(np.isnan(columns).any(1))).size:
        raise DataError(
            f"{path}: the outputs of {bad.size} of {len(columns)} rows are NaN, the first is row {bad[0]}, "
            "counted from 0: they name no class. HINT: look at that row; a .npy file takes them as they are."
        )
    for row in columns:
        best = int(row.argmax())
        writer.writerow([*([names[best] if names else best] if classes else []), *row.tolist()])
    return text.getvalue()
