"""A digest of a data set, to compare what two hosts, or two starts of a run, read.

- Arrays in memory, mapped files up to 1 GiB, and subsets of them: a digest of every byte and its place.
- Larger mapped files, tables and datasets with only `__getitem__`: up to 24 samples, read by their ids. A
  difference in another sample is not seen.

Samples are read twice: what a random augmentation makes differs between two reads and is not compared.
Processors of other makes round a preprocessing differently, so hosts may differ by a rounding: without
`to_the_bit` floats are compared by the samples alone, within 1e-5.
"""

import hashlib
import mmap
import os
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cyxjax.data.columns import leaves
from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset, Dataset, Subset

Summary = list[Any]  # of a leaf: its type and shape, then what its values come to
MAX_RECORDS = 24
MAX_S = 1.0  # for reading them: with slower records fewer are read
MAX_MAPPED_BYTES = 1 << 30  # of mapped files that are read whole: they may lie on a slow disk
_SLICE_BYTES = 1 << 20  # of an array in one checksum
_TOLERANCE = 1e-5
_WEIGHTS = np.arange(1.0, 18.0)
_EPOCH = 2**31 - 1  # an order that no training epoch has


def content_of(dataset: Dataset, most: int = MAX_RECORDS) -> dict[str, Any]:
    """JSON for `find_difference`: number of samples, summaries of `most` of them, and digests of arrays.

    Checkpoints of cyxjax 0.2.0 have sums under "whole", which are not compared, in place of the digests.
    """
    content = {"samples": len(dataset), "records": _records(dataset, most)}
    arrays = _arrays(dataset)
    if arrays is not None:
        content["bytes"] = [[_kind(leaf, len(dataset)), digest(leaf, rows)] for leaf, rows in arrays]
    return content


def digest(leaf: np.ndarray, rows: np.ndarray | None = None) -> str:
    """Of every byte of `leaf` and its place; of `leaf[rows]` where rows are given, copied a slice at a time.

    CRC-32 of slices of 1 MiB, by threads, and SHA-256 of these: 2.7 GB/s a thread.
    """
    count = len(leaf) if rows is None else len(rows)
    step = max(1, _SLICE_BYTES * len(leaf) // max(1, leaf.nbytes))

    def checksum(first: int) -> int:
        part = slice(first, first + step) if rows is None else rows[first : first + step]
        return zlib.crc32(np.ascontiguousarray(leaf[part]).reshape(-1).view(np.uint8).data)

    starts = range(0, count, step)
    if len(starts) < 4:
        found = [checksum(first) for first in starts]
    else:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            found = list(threads.map(checksum, starts))
    return hashlib.sha256(np.array(found, np.uint32).tobytes()).hexdigest()[:32]


def _arrays(dataset: Dataset) -> list[tuple[np.ndarray, np.ndarray | None]] | None:
    """(array, the rows of it that are samples, None for all) of every leaf; None where one is sampled."""
    rows: np.ndarray | None = None
    while isinstance(dataset, Subset):
        rows = dataset.rows if rows is None else dataset.rows[rows]
        dataset = dataset.dataset
    if not isinstance(dataset, ArrayDataset):
        return None
    found = [leaf for _, leaf in leaves((dataset.inputs, dataset.targets))]
    mapped = sum(leaf.nbytes for leaf in found if _is_mapped(leaf))
    if mapped > MAX_MAPPED_BYTES or not all(isinstance(leaf, np.ndarray) for leaf in found):
        return None
    return [(leaf, rows) for leaf in found]


def _is_mapped(leaf: Any) -> bool:
    while leaf is not None:
        if isinstance(leaf, np.memmap | mmap.mmap):
            return True
        leaf = getattr(leaf, "base", None)
    return False


def _kind(leaf: np.ndarray, count: int) -> str:
    return f"{leaf.dtype}[{','.join(map(str, (count, *leaf.shape[1:])))}]"


def find_difference(
    a: Mapping[str, Any], b: Mapping[str, Any], *, to_the_bit: bool = True
) -> tuple[str, str, str] | None:
    """(what differs, how it is in `a`, in `b`) of two contents; None if what both hold agrees.

    to_the_bit: False takes floats that differ by a rounding for equal.
    """
    room = 0.0 if to_the_bit else _TOLERANCE
    if a["samples"] != b["samples"]:
        return "the number of samples", str(a["samples"]), str(b["samples"])
    for name in a["records"]:
        if name in b["records"] and (found := _differ(a["records"][name], b["records"][name], room)):
            return f"sample {name}", *found
    if "bytes" in a and "bytes" in b:
        one, other = ([s for s in c["bytes"] if to_the_bit or not _is_float(s)] for c in (a, b))
        if found := _differ(one, other, 0.0):
            return "the bytes of all samples", *found
    return None


def _is_float(summary: Summary) -> bool:
    return str(summary[0]).startswith(("float", "bfloat", "complex"))


def drawn_anew(content: Mapping[str, Any]) -> list[str]:
    """Ids of the samples that were not the same when they were read twice."""
    return [name for name, record in content["records"].items() if ["random"] in (record or [])]


def read_otherwise(dataset: Dataset, most: int = MAX_RECORDS) -> int | None:
    """The id of a sample that is another one when it is read together with others; None if none is found.

    Of arrays in memory none is. What each read draws, `drawn_anew` tells; what cannot be read is passed over.
    """
    if isinstance(dataset, ArrayDataset):
        return None
    start, alone = time.monotonic(), {}
    try:
        for i in _some_ids(len(dataset), most):
            alone[i] = _leaves_of(dataset, [i])
            if time.monotonic() - start > MAX_S / 2:  # as long again for all together
                break
        together = _leaves_of(dataset, list(alone))
        for slot, (i, parts) in enumerate(alone.items()):
            beside = [leaf[slot : slot + 1] for leaf in together]
            if not all(map(_same, parts, beside)) and all(map(_same, parts, _leaves_of(dataset, [i]))):
                return i
    except Exception:
        return None
    return None


def _leaves_of(dataset: Dataset, ids: list[int]) -> list[np.ndarray]:
    return [leaf for _, leaf in leaves(dataset.take(np.array(ids)))]


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    return np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")


def _some_ids(num_samples: int, most: int) -> list[int]:
    shuffled = Order(num_samples, seed=0, epoch=_EPOCH)[: min(num_samples, most)]
    return list(dict.fromkeys([0, num_samples - 1, *shuffled.tolist()]))[:most]


def _records(dataset: Dataset, most: int) -> dict[str, list[Summary] | None]:
    """Summaries of the leaves of some samples by id; None for a sample that cannot be read."""
    start = time.monotonic()
    found: dict[str, list[Summary] | None] = {}
    for i in _some_ids(len(dataset), most):
        if time.monotonic() - start > MAX_S:
            break
        found[str(i)] = _record(dataset, i)
    return found


def _record(dataset: Dataset, i: int) -> list[Summary] | None:
    try:
        first, second = (_leaves_of(dataset, [i]) for _ in range(2))
    except Exception:  # whatever a user's dataset raises: it is for training to report, if it comes to i
        return None
    return [_summary(x) if _same(x, y) else ["random"] for x, y in zip(first, second, strict=True)]


def _summary(leaf: np.ndarray) -> Summary:
    """Type and shape, and the value of a whole number; else checksum, and of floats two sums before it."""
    kind, checksum = _kind(leaf, len(leaf)), zlib.crc32(np.ascontiguousarray(leaf).tobytes())
    if leaf.dtype.kind not in "fc":
        whole = leaf.size == 1 and leaf.dtype.kind in "iub"
        return [kind, int(leaf.reshape(-1)[0]) if whole else checksum]
    # Weights that rise within 17 values, so that the same values in another order come to another sum.
    real = np.abs(leaf) if leaf.dtype.kind == "c" else leaf
    values = real.astype(np.float64).reshape(-1)
    if not np.isfinite(values.sum()):
        values = np.nan_to_num(real).astype(np.float64).reshape(-1)
    cut = values.size // 17 * 17  # rows of 17 values: a column weighs the same, and is added up first
    rows, rest = values[:cut].reshape(-1, 17), values[cut:]
    total = rows.sum(0) @ _WEIGHTS + rest @ _WEIGHTS[: rest.size]
    return [kind, float(total), float(np.abs(values).sum()) * 17, checksum]


def _differ(a: list[Summary] | None, b: list[Summary] | None, room: float) -> tuple[str, str] | None:
    if a is None or b is None or len(a) != len(b):
        return None if a == b else (_text(a), _text(b))
    for one, other in zip(a, b, strict=True):
        if ["random"] not in (one, other) and not _alike(one, other, room):
            one_text, other_text = _text([one]), _text([other])
            return (one_text, other_text) if one_text != other_text else (repr(one), repr(other))
    return None


def _alike(a: Summary, b: Summary, tolerance: float) -> bool:
    """Floats of a checkpoint of 0.2.0, which wrote no checksum, are compared with the tolerance."""
    if len(a) < 3 or len(b) < 3 or (not tolerance and len(a) == len(b)):
        return a == b
    (kind, total, scale), (kind_b, total_b, scale_b) = a[:3], b[:3]
    room = (tolerance or _TOLERANCE) * max(scale, scale_b)
    return kind == kind_b and abs(total - total_b) <= room and abs(scale - scale_b) <= room


def _text(summaries: list[Summary] | None) -> str:
    """`float32[1,64] 1523.4; int64[1] 7`."""
    if summaries is None:
        return "cannot be read"
    return "; ".join(
        " ".join(f"{v:.9g}" if isinstance(v, float) else str(v) for v in s[:2]) for s in summaries
    )
