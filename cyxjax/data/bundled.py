"""Real data that needs no network: scikit-learn's bundled tables and scans, and Python's own help texts."""

from importlib import import_module
from typing import Any

import numpy as np

from cyxjax.data.sources import ArrayDataset
from cyxjax.data.splits import DatasetInfo, Splits, as_images, split_arrays, split_rows
from cyxjax.errors import ConfigError


def load_digits(**split: Any) -> Splits:
    """1,797 scans of handwritten digits: float32 (8, 8, 1) in [0, 1], int32 labels 0 to 9."""
    bunch = _sklearn("load_digits")
    info = DatasetInfo("digits", "classification", 10, (8, 8, 1))
    return split_arrays(as_images(bunch.images, 16), bunch.target.astype(np.int32), info, **split)


def load_wine(**split: Any) -> Splits:
    """178 wines: 13 measurements, standardised; 3 cultivars."""
    return _table("wine", "load_wine", "classification", **split)


def load_breast_cancer(**split: Any) -> Splits:
    """569 biopsies: 30 measurements, standardised; malignant (0) or benign (1)."""
    return _table("breast_cancer", "load_breast_cancer", "classification", **split)


def load_diabetes(**split: Any) -> Splits:
    """442 patients: 10 measurements, standardised; progression after a year, standardised, shape (1,)."""
    return _table("diabetes", "load_diabetes", "regression", **split)


def load_text(sequence_length: int = 64, val_fraction: float = 0.1, test_fraction: float = 0.1) -> Splits:
    """Characters of Python's help texts (465 kB of English): int32 (sequence_length,), next character each.

    The text is cut in three stretches, so that validation and test text is never seen in training.
    """
    topics = import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    vocabulary = "".join(sorted(set(text)))
    tokens = _tokens(text, vocabulary)
    edges = np.rint(np.cumsum([1 - val_fraction - test_fraction, val_fraction]) * len(tokens)).astype(int)
    train, val, test = [next_token_windows(part, sequence_length) for part in np.split(tokens, edges)]
    info = DatasetInfo("text", "language", len(vocabulary), (sequence_length,), vocabulary)
    return Splits(train, val, test, info)


def next_token_windows(tokens: np.ndarray, sequence_length: int) -> ArrayDataset:
    """Windows that do not overlap: inputs tokens[i : i+T], targets the same moved on by one; both (N, T).

    Raises: ConfigError when the text is shorter than one window.
    """
    num_windows = (len(tokens) - 1) // sequence_length if sequence_length > 0 else 0
    if num_windows == 0:
        raise ConfigError(
            f"sequence_length={sequence_length} with a text of {len(tokens)} characters; expected 1 to "
            f"{len(tokens) - 1}. HINT: use a shorter sequence_length."
        )
    used = num_windows * sequence_length
    shape = (num_windows, sequence_length)
    return ArrayDataset(tokens[:used].reshape(shape), tokens[1 : used + 1].reshape(shape))


def _tokens(text: str, vocabulary: str) -> np.ndarray:
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.frombuffer(vocabulary.encode("utf-32-le"), np.uint32)
    return np.searchsorted(known, points).astype(np.int32)


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
