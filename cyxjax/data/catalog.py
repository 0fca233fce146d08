"""Data sets by name: `load_dataset("digits")`, `load_dataset("csv", "prices.csv", target="price")`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data import bundled, files, images, text
from cyxjax.data.extras import tables
from cyxjax.data.sources import as_dataset
from cyxjax.data.splits import DatasetInfo, Splits, Task, split_rows
from cyxjax.errors import ConfigError, DataError, nearest
from cyxjax.plugins import checked_kinds, named

Loader = Callable[..., Splits]

_LOADERS: dict[str, Loader] = {
    "digits": bundled.load_digits,
    "wine": bundled.load_wine,
    "breast_cancer": bundled.load_breast_cancer,
    "diabetes": bundled.load_diabetes,
    "text": text.load_text,
    "mnist": files.load_mnist,
    "fashion_mnist": files.load_fashion_mnist,
    "cifar10": files.load_cifar10,
    "npz": files.load_npz,
    "npy": files.load_npy,
    "csv": files.load_csv,
    "image_folder": images.load_image_folder,
    "parquet": tables.load_parquet,
    "hf": tables.load_hugging_face,
    "array_record": tables.load_array_record,
}


def names() -> list[str]:
    """Names that `load_dataset` knows."""
    return sorted(_LOADERS)


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> Splits:
    """Train, validation and test splits of the data set `name`, the same in every run.

    `root` is the file or folder of the sets that are read from files. Options are the loader's own, such as
    `sequence_length` of "text", `target` of "csv", `val_fraction`, `test_fraction` and `split_seed`.

    Raises: ConfigError for an unknown name or option, naming the nearest; DataError for an unreadable file.
    """
    loader = named("data set", name, _LOADERS, unknown=f"unknown data set {name!r}.")
    if not callable(loader):
        raise ConfigError(
            f"data set {name!r} is a {type(loader).__name__}. HINT: name a function.", key="name"
        )
    options = _checked(name, loader, options)
    return as_splits(name, loader(*_root(name, loader, root), **options))


def as_splits(name: str, found: Any) -> Splits:
    """What a loader gave: Splits, or (train, validation, test), each a data set or (inputs, targets) arrays.

    Of three the task is read off the training targets: whole numbers are classes, others are to be met.
    Raises: DataError for anything else.
    """
    if isinstance(found, Splits):
        return found
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise DataError(
            f"data set {name!r} gave a {type(found).__name__}; expected cx.data.Splits, or three of (inputs, "
            "targets): train, validation, test. HINT: return (train, val, test)."
        )
    train, val, test = map(as_dataset, found)
    inputs, targets = train.take(np.zeros(1, np.int64))
    every = getattr(train, "targets", None)
    if not isinstance(every, np.ndarray) or not isinstance(inputs, np.ndarray):
        raise DataError(
            f"data set {name!r} does not say what a model needs to know of it. HINT: return cx.data.Splits("
            "train, val, test, cx.data.DatasetInfo(name, task, num_classes, input_shape))."
        )
    whole = every.dtype.kind in "biu"
    width = int(every.max()) + 1 if whole else int(np.prod(targets.shape[1:], dtype=int))
    task: Task = "classification" if whole else "regression"
    return Splits(train, val, test, DatasetInfo(name, task, width, inputs.shape[1:]))


def _root(name: str, loader: Loader, root: str | Path | None) -> tuple[Path, ...]:
    """What to pass as `root`: nothing where it is not given and not needed."""
    wanted = inspect.signature(loader).parameters.get("root")
    if wanted is None and root is not None:
        raise ConfigError(
            f"data set {name!r} is not read from files, but root={root}. HINT: leave root out.", key="root"
        )
    if wanted is not None and wanted.default is wanted.empty and root is None:
        raise ConfigError(
            f"data set {name!r} is read from files. HINT: set root to its file or folder.", key="root"
        )
    if root is not None and not Path(root).exists():
        raise ConfigError(
            f"root={root} of data set {name!r} does not exist. HINT: check the path.", key="root"
        )
    return () if root is None else (Path(root),)


def _checked(name: str, loader: Loader, options: dict[str, Any]) -> dict[str, Any]:
    """`options` of the kinds that the loader takes. Raises: ConfigError."""
    known = _options(loader)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"data set {name!r} has no option {option!r}. HINT: {nearest(option, known)}",
                key=f"options.{option}",
            )
    for takes in (loader, split_rows):  # the latter for what is handed on
        options = checked_kinds(f"data set {name!r}", takes, options, "options")
    return options


def _options(loader: Loader) -> set[str]:
    """The loader's keywords; those that it hands on as **split are `split_rows`'s."""
    parameters = inspect.signature(loader).parameters.values()
    known = {item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD} - {"root"}
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        handed_on = inspect.signature(split_rows).parameters.values()
        known |= {item.name for item in handed_on if item.kind is item.KEYWORD_ONLY}
    return known
