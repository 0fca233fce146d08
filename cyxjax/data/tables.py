"""Data sets by name that other libraries wrote: Parquet, Hugging Face's folders, ArrayRecord."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data.columns import TARGET_NAMES, Columns, split
from cyxjax.data.items import ItemDataset
from cyxjax.data.sources import ArrayDataset, Dataset, Subset, as_dataset
from cyxjax.data.splits import DatasetInfo, Splits, Task, split_rows
from cyxjax.errors import ConfigError, DataError, nearest
from cyxjax.plugins import named


def load_parquet(
    root: Path,
    target: str | None = None,
    inputs: Sequence[str] | None = None,
    task: Task | None = None,
    **split: Any,
) -> Splits:
    """A Parquet file, or a folder of parts, read whole: numbers, lists of one length, words as classes.

    `target` names the target column (default: label, target, y, ...), `inputs` those to read besides. Columns
    of numbers are one float32 array (N, columns); with lists among them each is an input of its own.
    """
    parquet: Any = extra("pyarrow.parquet", "parquet")
    try:
        wanted = [*inputs, *([target] if target else [])] if inputs else None
        table = parquet.read_table(root, columns=wanted)
    except (OSError, ValueError, KeyError) as err:
        raise DataError(f"{root}: cannot be read as Parquet ({err}). HINT: check the file.") from err
    for name in wanted or ([target] if target else []):
        if name not in table.column_names:
            raise ConfigError(
                f"{root} has no column {name!r}. HINT: {nearest(name, table.column_names)}", key="options"
            )
    columns = {name: _column(root, name, table.column(name)) for name in table.column_names}
    given, targets = split_names(root, columns, target)
    names: tuple[str, ...] = ()
    if targets.dtype.kind == "U":
        classes, targets = np.unique(targets, return_inverse=True)
        names, targets = tuple(classes.tolist()), targets.astype(np.int32)
    found = splits_of("parquet", as_dataset((given, targets)), task, names, **split)
    label = target or next(name for name in TARGET_NAMES if name in columns)
    inputs_of = tuple(name for name in columns if name != label)
    one_each = isinstance(given, np.ndarray) and given.shape[1:] == (len(inputs_of),)
    return found._replace(info=replace(found.info, column_names=inputs_of)) if one_each else found


def split_names(root: Path, columns: dict[str, Any], target: str | None) -> tuple[Any, Any]:
    """(inputs, targets) of columns: numbers in one array."""
    try:
        given, targets = split(columns, Columns(None, target))
    except DataError as err:
        raise DataError(f"{root}: {err}") from err
    if given is targets:
        raise ConfigError(
            f"{root}: which of {', '.join(columns)} is the target? HINT: set options.target.",
            key="options.target",
        )
    numbers = lambda one: np.ndim(one) == 1 and one.dtype.kind in "biuf"  # noqa: E731
    if isinstance(given, dict) and all(map(numbers, given.values())):
        return np.stack(list(given.values()), 1).astype(np.float32), targets
    return given, targets


def _column(root: Path, name: str, column: Any) -> Any:
    if column.null_count:
        rows = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        raise DataError(
            f"{root}: column {name!r} has no value in {len(rows)} rows, the first is {rows[0]}. "
            "HINT: fill them, or leave these rows out."
        )
    kind = str(column.type)
    if "list" in kind:
        lengths = np.array([len(one) for one in column])
        if len(set(lengths.tolist())) > 1:
            raise DataError(
                f"{root}: lists of column {name!r} have {lengths.min()} to {lengths.max()} values. "
                "HINT: pad them to one length."
            )
        return np.array(column.to_pylist())
    return np.asarray(column.to_pylist()) if "string" in kind else column.to_numpy()


def load_hugging_face(
    root: Path, target: str | None = None, inputs: Sequence[str] | None = None, **split: Any
) -> Splits:
    """A folder that `Dataset.save_to_disk` wrote: train, validation and test parts, or one to be split."""
    datasets: Any = extra("datasets", "hf")
    try:
        found = datasets.load_from_disk(str(root))
    except (OSError, ValueError) as err:
        raise DataError(
            f"{root}: no folder of Hugging Face's ({err}). HINT: write it with dataset.save_to_disk."
        ) from err
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    first = parts["train"]
    labels = target or next((name for name in TARGET_NAMES if name in first.features), "")
    names = tuple(getattr(first.features.get(labels), "names", None) or ())
    made = {part: as_dataset(one, inputs=inputs, targets=target) for part, one in parts.items()}
    rest = [made.get("validation", made.get("val")), made.get("test")]
    info = _info("hf", made["train"], "classification" if names else None, len(names) or None, names)
    if None in rest:
        return _cut(made["train"], info, **split)
    return Splits(made["train"], rest[0], rest[1], info)  # type: ignore[arg-type]


def load_array_record(
    root: Path,
    decode: str = "",
    task: Task = "classification",
    num_classes: int | None = None,
    num_workers: int = 0,
    **split: Any,
) -> Splits:
    """ArrayRecord files, by number. `decode`: `module:function`, a record's bytes -> (inputs, target)."""
    module: Any = extra("array_record.python.array_record_data_source", "grain")
    if ":" not in decode:
        raise ConfigError(
            "data set 'array_record' needs options.decode, a function bytes -> (inputs, target). "
            "HINT: decode: my_code:decode.",
            key="options.decode",
        )
    files = sorted(map(str, root.glob("*.array_record*"))) if root.is_dir() else [str(root)]
    if not files:
        raise DataError(f"{root}: no file *.array_record* in it. HINT: check the folder.")
    records = Decoded(module.ArrayRecordDataSource(files), named("decoder", decode, {}, key="options.decode"))
    whole = ItemDataset(records, num_workers)
    return _cut(whole, _info("array_record", whole, task, num_classes), **split)


class Decoded:
    """Records by number, each as `decode` gives it."""

    def __init__(self, source: Any, decode: Callable[[bytes], Any]):
        self._source, self._decode = source, decode

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._source[index])


def splits_of(
    name: str, whole: Dataset, task: Task | None = None, names: tuple[str, ...] = (), **split: Any
) -> Splits:
    """`whole` in three, class by class; whole numbers are classes, of `names`, other numbers quantities."""
    info = _info(name, whole, task, names=names)
    targets = np.asarray(whole.targets) if isinstance(whole, ArrayDataset) else np.zeros(len(whole))
    if info.task == "regression" and isinstance(whole, ArrayDataset):
        whole = ArrayDataset(whole.inputs, targets.astype(np.float32).reshape(len(targets), -1))
    train, val, test = [Subset(whole, rows) for rows in split_rows(targets, info.task, **split)]
    return Splits(train, val, test, info)


def _cut(whole: Dataset, info: DatasetInfo, **split: Any) -> Splits:
    """As `splits_of`, of samples whose targets are not read beforehand."""
    rows = split_rows(np.zeros(len(whole), np.int64), "regression", **split)
    train, val, test = [Subset(whole, part) for part in rows]
    return Splits(train, val, test, info)


def _info(
    name: str, whole: Dataset, task: Task | None, num_classes: int | None = None, names: tuple[str, ...] = ()
) -> DatasetInfo:
    inputs, targets = whole.take(np.zeros(1, np.int64))
    every = whole.targets if isinstance(whole, ArrayDataset) else None
    task = task or ("classification" if targets.dtype.kind in "biu" else "regression")
    if task == "classification" and num_classes is None:
        if every is None and not names:
            raise ConfigError(
                f"data set {name!r} does not say how many classes there are. HINT: set options.num_classes.",
                key="options.num_classes",
            )
        num_classes = len(names) or int(np.max(np.asarray(every))) + 1
    width = num_classes if task == "classification" else int(np.prod(targets.shape[1:], dtype=int))
    return DatasetInfo(name, task, width or 1, np.shape(inputs)[1:], class_names=names)


def extra(module: str, name: str) -> Any:
    """A library that is an extra of ours. Raises: ConfigError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as err:
        raise ConfigError(
            f"{module.partition('.')[0]} is not installed ({err}). HINT: pip install 'cyxjax[{name}]'"
        ) from err
