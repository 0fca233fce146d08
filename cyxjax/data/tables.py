"""Datasets in Parquet files, Hugging Face folders and ArrayRecord files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data.columns import TARGET_NAMES, map_leaves
from cyxjax.data.sources import ArrayDataset, Dataset, as_dataset
from cyxjax.data.splits import VAL_NAMES, Splits, Task, describe, split_dataset
from cyxjax.errors import ConfigError, DataError, nearest
from cyxjax.files import readable
from cyxjax.plugins import extra, named


def load_parquet(
    root: Path,
    target: str | None = None,
    inputs: Sequence[str] | None = None,
    task: Task | None = None,
    **split: Any,
) -> Splits:
    """A Parquet file, or a folder of parts, in memory: numbers, lists of equal length, words as classes.

    `target` names the target column (default: label, target, y, ...), `inputs` the input columns to read.
    Columns of numbers become one float32 array (N, columns); if there are lists, each column is a separate
    input. A null among inputs becomes NaN.
    """
    parquet: Any = extra("pyarrow.parquet", "cyxjax[parquet]")
    with readable(root):
        stored = parquet.ParquetDataset(root)
        known = stored.schema.names
        free = [name for name in TARGET_NAMES if name in known and name not in (inputs or ())]
        label = target or next(iter(free), "label")
        wanted = [*inputs, label] if inputs else known
        for name in (*wanted, label):
            if name not in known or len(known) < 2:
                raise ConfigError(
                    f"{root} has {len(known)} columns; expected {name!r} and others. "
                    f"HINT: {nearest(name, known)}",
                    key="options.target",
                )
        table = stored.read(columns=wanted)
    if nulls := table.column(label).null_count:  # they would turn classes into quantities
        raise DataError(
            f"{root}: {nulls} of {len(table)} values of the target {label!r} are null. HINT: leave those "
            "rows out, or fill them."
        )
    columns = {name: _column(root, name, table.column(name)) for name in table.column_names}
    targets = columns.pop(label)
    names: tuple[str, ...] = ()
    if targets.dtype.kind == "U":
        classes, targets = np.unique(targets, return_inverse=True)
        names, targets = tuple(classes.tolist()), targets.astype(np.int32)
    elif task == "classification" and targets.dtype.kind == "f" and (targets == np.rint(targets)).all():
        targets = targets.astype(np.int32)  # whole numbers that were stored as floats
    together = all(np.ndim(a) == 1 and a.dtype.kind in "biuf" for a in columns.values())
    if together:
        given: Any = np.stack(list(columns.values()), 1).astype(np.float32)
    else:
        given = columns if len(columns) > 1 else next(iter(columns.values()))
    whole = as_dataset((given, targets))
    column_names = tuple(columns) if together else ()
    info = describe("parquet", whole, task, class_names=names, column_names=column_names)
    if info.task == "regression":
        whole = ArrayDataset(given, _quantities(targets))
    return split_dataset(whole, info, targets, **split)


def _column(root: Path, name: str, column: Any) -> Any:
    kind = str(column.type)
    if "list" in kind:
        with readable(f"column {name!r} of {root}", hint="pad its lists to one length"):
            return _unnested(column)
    return np.asarray(column.to_pylist()) if "string" in kind else column.to_numpy()


def _unnested(column: Any) -> np.ndarray:
    """A column of lists, also nested, as an array of their type. Raises: ValueError for unequal lengths."""
    compute: Any = extra("pyarrow.compute", "cyxjax[parquet]")

    shape = [len(column)]
    while "list" in str(column.type):
        lengths = compute.unique(compute.list_value_length(column)).to_pylist()
        if len(lengths) != 1 or None in lengths:
            raise ValueError(f"its lists have the lengths {lengths[:5]}")
        shape += lengths
        column = compute.list_flatten(column)
    return column.to_numpy().reshape(shape)


def load_hugging_face(
    root: Path,
    target: str | None = None,
    inputs: Sequence[str] | None = None,
    task: Task | None = None,
    num_classes: int | None = None,
    **split: Any,
) -> Splits:
    """A folder written by `Dataset.save_to_disk`: train, validation and test; missing ones are drawn."""
    datasets: Any = extra("datasets", "cyxjax[hf]")
    with readable(root, hint="write it with dataset.save_to_disk, with a part 'train' if there are several"):
        found = datasets.load_from_disk(str(root))
        parts = dict(found) if isinstance(found, dict) else {"train": found}
        first = parts["train"]
    labels = target or next((name for name in TARGET_NAMES if name in first.features), "")
    names = tuple(getattr(first.features.get(labels), "names", None) or ())
    made: dict[str, Dataset] = {
        part: as_dataset(one, inputs=inputs, targets=target) for part, one in parts.items()
    }
    task, num_classes = task or ("classification" if names else None), num_classes or len(names) or None
    info = describe("hf", made["train"], task, num_classes, names)
    if info.task == "regression":
        made = {part: Quantities(one) for part, one in made.items()}
    rest = next((made[name] for name in VAL_NAMES if name in made), None), made.get("test")
    return split_dataset(made["train"], info, None, rest, **split)


@dataclass(frozen=True)
class Quantities:
    """The samples of `dataset` with targets as a regression has them: float32 (N, outputs)."""

    dataset: Dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        inputs, targets = self.dataset.take(indices)
        return inputs, map_leaves(_quantities, targets)


def _quantities(targets: np.ndarray) -> np.ndarray:
    return targets.astype(np.float32).reshape(len(targets), -1)


def load_array_record(
    root: Path,
    decode: str = "",
    task: Task = "classification",
    num_classes: int | None = None,
    num_workers: int = 0,
    **split: Any,
) -> Splits:
    """ArrayRecord files, read by index. `decode`: `module:function`, bytes -> (inputs, target)."""
    module: Any = extra("array_record.python.array_record_data_source", "cyxjax[grain]")
    if ":" not in decode:
        raise ConfigError(
            "dataset 'array_record' needs options.decode, a function bytes -> (inputs, target). "
            "HINT: decode: my_code:decode.",
            key="options.decode",
        )
    files = sorted(map(str, root.glob("*.array_record*"))) if root.is_dir() else [str(root)]
    with readable(root):
        source = module.ArrayRecordDataSource(files)
    whole = as_dataset(
        Decoded(source, named("decoder", decode, {}, key="options.decode")), num_workers=num_workers
    )
    return split_dataset(whole, describe("array_record", whole, task, num_classes), **split)


class Decoded:
    """Records by index, each decoded by `decode`."""

    def __init__(self, source: Any, decode: Callable[[bytes], Any]):
        self._source, self._decode = source, decode

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._source[index])
