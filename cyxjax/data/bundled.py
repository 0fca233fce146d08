"""Real data that needs no network: the tables and scans that come with scikit-learn."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data.sources import ArrayDataset
from cyxjax.data.splits import DatasetInfo, Splits, as_images, split_arrays, split_rows
from cyxjax.errors import ConfigError


def load_digits(**split: Any) -> Splits:
    """1,797 scans of handwritten digits: float32 (8, 8, 1) in [0, 1], int32 labels 0 to 9."""
    table = _digits()
    info = DatasetInfo("digits", "classification", 10, (8, 8, 1))
    images, labels = table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(np.int32)
    return split_arrays(as_images(images, 16), labels, info, **split)


def _digits() -> np.ndarray:
    """float64 (1797, 65): 64 pixels and the label, from the file that scikit-learn installs.

    To load the library itself would cost each start of each rank a second.
    """
    spec = find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    bunch = _sklearn("load_digits")  # it is not there, or elsewhere
    return np.column_stack([bunch.data, bunch.target])


def load_wine(**split: Any) -> Splits:
    """178 wines: 13 measurements, standardised; 3 cultivars."""
    return _table("wine", "load_wine", "classification", **split)


def load_breast_cancer(**split: Any) -> Splits:
    """569 biopsies: 30 measurements, standardised; malignant (0) or benign (1)."""
    return _table("breast_cancer", "load_breast_cancer", "classification", **split)


def load_diabetes(**split: Any) -> Splits:
    """442 patients: 10 measurements, standardised; progression after a year, standardised, shape (1,)."""
    return _table("diabetes", "load_diabetes", "regression", **split)


def _table(name: str, loader: str, task: Any, **split: Any) -> Splits:
    """A table whose columns (and regression target) are standardised by the training rows alone."""
    bunch = _sklearn(loader)
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


def _sklearn(loader: str) -> Any:
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError(
            f"{loader} needs scikit-learn, which is not installed ({error}). "
            "HINT: pip install 'cyxjax[digits]'."
        ) from error
    return getattr(datasets, loader)()
