"""The result of a loader: training, validation and test samples, and what a model must know about them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import sub
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset, Dataset, Subset
from cyxjax.errors import ConfigError, DataError

Task = Literal["classification", "regression", "language"]
VAL_NAMES = ("val", "valid", "validation")  # of a folder or part that holds validation samples


@dataclass(frozen=True)
class DatasetInfo:
    """The facts about a dataset that are needed to build a model for it."""

    name: str
    task: str  # a `Task`, or a name of your own, for which the configuration names the loss
    num_classes: int  # width of the model's output: classes, vocabulary size, or 1 for regression
    input_shape: tuple[int, ...]  # of one sample, without the batch dimension
    vocabulary: str = ""  # language: character i is token i
    class_names: tuple[str, ...] = ()  # if the data names its classes
    column_names: tuple[str, ...] = ()  # of inputs that are columns of a table, if it names them

    def __post_init__(self) -> None:
        stored = {  # from numbers of NumPy, and classes named by numbers: as `from_json` reads them
            "num_classes": int(self.num_classes),
            "input_shape": tuple(map(int, self.input_shape)),
            "vocabulary": self.vocabulary or "",
            "class_names": tuple(map(str, () if self.class_names is None else self.class_names)),
            "column_names": tuple(map(str, () if self.column_names is None else self.column_names)),
        }
        for name, value in stored.items():
            object.__setattr__(self, name, value)

    def to_json(self) -> str:
        """A JSON text, for `from_json`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "DatasetInfo":
        """The inverse of `to_json`. Raises: ValueError for another text."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(text)


class Splits(NamedTuple):
    """Disjoint sets of samples from one source."""

    train: Dataset
    val: Dataset
    test: Dataset
    info: DatasetInfo


def describe(
    name: str,
    dataset: Dataset,
    task: Task | None = None,
    num_classes: int | None = None,
    class_names: tuple[str, ...] = (),
    column_names: tuple[str, ...] = (),
) -> DatasetInfo:
    """The DatasetInfo of `dataset`, from its first sample: integer targets are classes, unless `task` says
    otherwise. Targets that are a tree of arrays count as regression.

    Raises: ConfigError if the number of classes is neither given nor known from targets in an array.
    """
    inputs, targets = dataset.take(np.zeros(1, np.int64))
    kind, dims = (targets.dtype.kind, targets.shape[1:]) if hasattr(targets, "dtype") else ("f", ())
    task = task or ("classification" if kind in "biu" else "regression")
    width = int(np.prod(dims, dtype=int))
    if task == "classification":
        every = dataset.targets if isinstance(dataset, ArrayDataset) else None
        if num_classes is None and every is None and not class_names:
            raise ConfigError(
                f"dataset {name!r} does not say how many classes there are. HINT: set "
                "options.num_classes if the loader takes it; a function of your own returns cx.data.Splits("
                "train, val, test, cx.data.DatasetInfo(name, 'classification', num_classes, input_shape)).",
                key="options.num_classes",
            )
        width = num_classes or len(class_names) or int(np.max(np.asarray(every))) + 1
    shape = np.shape(inputs)[1:]
    return DatasetInfo(name, task, width or 1, shape, class_names=class_names, column_names=column_names)


def split_dataset(
    whole: Dataset,
    info: DatasetInfo,
    targets: np.ndarray | None = None,
    stored: tuple[Dataset | None, Dataset | None] = (None, None),
    **split: Any,
) -> Splits:
    """Splits of a dataset without copying it; by class, if `targets` are given and are classes.

    stored: the validation and test set; one that is None is drawn from `whole`.
    """
    labels, task = (np.zeros(len(whole)), "regression") if targets is None else (targets, info.task)
    rows = split_rows(labels, task, [part is not None for part in stored], **split)
    train, *drawn = [Subset(whole, part) for part in rows] if None in stored else [whole]
    val, test = (drawn.pop(0) if part is None else part for part in stored)
    return Splits(train, val, test, info)


def split_arrays(
    whole: ArrayDataset, info: DatasetInfo, test: ArrayDataset | None = None, **split: Any
) -> Splits:
    """Splits of in-memory arrays; `split` as in `split_rows`. test: the test set; None: it is drawn too."""
    rows = split_rows(whole.targets, info.task, (False, test is not None), **split)
    train, val, *drawn = [ArrayDataset(whole.inputs[part], whole.targets[part]) for part in rows]
    return Splits(train, val, test or drawn[0], info)


def split_rows(
    targets: np.ndarray,
    task: str,
    stored: Sequence[bool] = (False, False),
    *,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> list[npt.NDArray[np.int64]]:
    """Row numbers for train, val and test, drawn by class if the task is classification.

    The same in every run, on every machine and with every numpy, because the draw is an `Order`.
    stored: whether val and test are stored elsewhere, so that nothing is drawn for them.
    """
    by_class = task == "classification" and targets.size == len(targets)  # else several labels per sample
    labels = targets.reshape(-1) if by_class else np.zeros(len(targets), np.int64)
    fractions = zip((val_fraction, test_fraction), stored, strict=True)
    drawn = [fraction for fraction, is_stored in fractions if not is_stored]
    return stratified_rows(labels, (reduce(sub, drawn, 1.0), *drawn), split_seed)


def stratified_rows(
    labels: npt.NDArray[np.integer], fractions: tuple[float, ...], seed: int
) -> list[npt.NDArray[np.int64]]:
    """Row numbers of each part, ascending; every class is divided by `fractions` to within one sample.

    fractions: their sum is 1. Raises: ConfigError unless they are positive; DataError if a part is empty.
    """
    if min(fractions) <= 0:
        raise ConfigError(
            f"split fractions {fractions}; expected positive numbers. "
            "HINT: set val_fraction and test_fraction so that their sum is below 1."
        )
    edges = np.cumsum(fractions)[:-1]
    parts: list[list[np.ndarray]] = [[] for _ in fractions]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled = members[Order(len(members), seed, int(label) & 0xFFFFFFFF)[:]]
        cuts = np.rint(edges * len(members)).astype(int)
        for part, rows in zip(parts, np.split(shuffled, cuts), strict=True):
            part.append(rows)
    whole = [np.sort(np.concatenate(part)) for part in parts]
    if not all(len(part) for part in whole):
        num_classes = len(np.unique(labels))
        raise DataError(
            f"{len(labels)} samples of {num_classes} classes are too few for {len(fractions)} splits. "
            "HINT: add samples; if the targets are quantities, not classes, set task to regression."
        )
    return whole


def as_images(pixels: np.ndarray, largest: float) -> npt.NDArray[np.float32]:
    """Grey images (N, H, W) or colour images (N, H, W, C) as float32 (N, H, W, C) in [0, 1]."""
    images: Any = pixels[..., None] if pixels.ndim == 3 else pixels
    return images.astype(np.float32) / np.float32(largest)
