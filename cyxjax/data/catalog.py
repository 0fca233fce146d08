"""Datasets by name: `load_dataset("digits")`, `load_dataset("csv", "prices.csv", target="price")`.

Four come with scikit-learn and need no network; the others are read from files."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data import files, tables, text
from cyxjax.data.sources import ArrayDataset, as_dataset, has_items
from cyxjax.data.splits import DatasetInfo, Splits, as_images, describe, split_arrays, split_rows
from cyxjax.errors import ConfigError, DataError
from cyxjax.plugins import checked_options, extra, named


def load_digits(**split: Any) -> Splits:
    """1,797 scans of handwritten digits: float32 (8, 8, 1) in [0, 1], int32 labels 0 to 9."""
    table = _digits()
    info = DatasetInfo("digits", "classification", 10, (8, 8, 1))
    images, labels = table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(np.int32)
    return split_arrays(ArrayDataset(as_images(images, 16), labels), info, **split)


def _digits() -> np.ndarray:
    """float64 (1797, 65): 64 pixels and the label, from the file that scikit-learn installs.

    Importing the library itself would take a second at each start of each rank.
    """
    spec = find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    bunch = extra("sklearn.datasets", "cyxjax[digits]").load_digits()  # the file is missing, or elsewhere
    return np.column_stack([bunch.data, bunch.target])


def _table(name: str, task: Any, **split: Any) -> Splits:
    """A table of scikit-learn whose columns (and regression target) are standardised with the training rows
    only; a regression target has shape (1,).
    """
    bunch = getattr(extra("sklearn.datasets", "cyxjax[digits]"), f"load_{name}")()
    regression = task == "regression"
    targets = bunch.target.astype(np.float32)[:, None] if regression else bunch.target.astype(np.int32)
    info = DatasetInfo(name, task, 1 if regression else len(bunch.target_names), bunch.data.shape[1:])
    rows = split_rows(targets, task, **split)
    inputs = _standardised([bunch.data[part] for part in rows])
    wanted = [targets[part] for part in rows]
    wanted = _standardised(wanted) if regression else wanted
    train, val, test = [ArrayDataset(x, y) for x, y in zip(inputs, wanted, strict=True)]
    return Splits(train, val, test, info)


def _standardised(parts: list[np.ndarray]) -> list[np.ndarray]:
    mean, std = parts[0].mean(0), parts[0].std(0)
    return [((part - mean) / np.where(std > 0, std, 1)).astype(np.float32) for part in parts]


_LOADERS: dict[str, Callable[..., Splits]] = {
    "digits": load_digits,
    "wine": partial(_table, "wine", "classification"),  # 178 wines: 13 measurements; 3 cultivars
    # 569 biopsies: 30 measurements; malignant (0) or benign (1)
    "breast_cancer": partial(_table, "breast_cancer", "classification"),
    # 442 patients: 10 measurements; progression after a year
    "diabetes": partial(_table, "diabetes", "regression"),
    "text": text.load_text,
    "mnist": partial(files.load_idx, "mnist", "MNIST/raw"),
    "fashion_mnist": partial(files.load_idx, "fashion_mnist", "FashionMNIST/raw"),  # clothes
    "cifar10": files.load_cifar10,
    "npz": files.load_npz,
    "npy": files.load_npy,
    "csv": files.load_csv,
    "image_folder": files.load_image_folder,
    "parquet": tables.load_parquet,
    "hf": tables.load_hugging_face,
    "array_record": tables.load_array_record,
}


def load_dataset(name: str, root: str | Path | None = None, **options: Any) -> Splits:
    """Train, validation and test splits of the dataset `name`, the same in every run.

    `root` is the file or folder of datasets that are read from files. Options are those of the loader, such
    as `sequence_length` of "text", `target` of "csv", `val_fraction`, `test_fraction` and `split_seed`.

    Raises: ConfigError for an unknown name or option, naming the nearest; DataError for an unreadable file.
    """
    return splits_of(name, root, options)


def splits_of(name: str, root: str | Path | None, options: dict[str, Any]) -> Splits:
    """`load_dataset`; a loader's options may be called `name` and `root` too."""
    loader = named("dataset", name, _LOADERS, unknown=f"unknown dataset {name!r}.")
    wanted = inspect.signature(loader).parameters.get("root")
    is_missing = root is None and wanted is not None and wanted.default is wanted.empty
    if is_missing or (root is not None and wanted is not None and not Path(root).exists()):
        raise ConfigError(
            f"root={root} of dataset {name!r} does not exist. HINT: set root to its file or folder.",
            key="root",
        )
    options = options | ({} if root is None else {"root": Path(root)})
    options = checked_options(f"dataset {name!r}", loader, options, "options", hands_on=split_rows)
    return as_splits(name, loader(**options))


def as_splits(name: str, found: Any) -> Splits:
    """`found` as Splits: Splits, or (train, validation, test), each a dataset or (inputs, targets) arrays.

    For three parts the training targets determine the task: integers are classes, others a regression.
    Raises: DataError for anything else.
    """
    if isinstance(found, Splits):
        train, val, test = (as_dataset(part) if has_items(part) else part for part in found[:3])
        return Splits(train, val, test, found.info)
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise DataError(
            f"dataset {name!r} gave a {type(found).__name__}; expected cx.data.Splits, or three of (inputs, "
            "targets): train, validation, test. HINT: return (train, val, test)."
        )
    train, val, test = map(as_dataset, found)
    return Splits(train, val, test, describe(name, train))
