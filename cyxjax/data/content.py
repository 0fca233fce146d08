"""A digest of a dataset, to compare the data that two hosts, or two starts of a run, read.

- Arrays in memory, mapped files up to 1 GiB, and subsets of them: a digest of every byte and its place.
- Larger mapped files, tables and datasets with only `__getitem__`: up to 24 samples, read by their ids. A
  difference in another sample is not found.

Samples are read twice: arrays that differ between two reads of a sample, as from a random augmentation, are
not compared in any sample.
Different processors may round a preprocessing differently: without `to_the_bit`, floats are compared
only in the samples, within 1e-5.
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

Summary = list[Any]  # of a leaf: its type and shape, then its value, or sums and a checksum of its values
MAX_RECORDS = 24
MAX_S = 1.0  # for reading them; fewer are read if it is exceeded
MAX_MAPPED_BYTES = 1 << 30  # of mapped files that are read completely, which may be on a slow disk
_SLICE_BYTES = 1 << 20  # of an array per checksum
_TOLERANCE = 1e-5
_GOLDEN = (5**0.5 - 1) / 2
_RANDOM = ["random"]  # the summary of a leaf that differed between two reads
_EPOCH = 2**31 - 1  # an order that no training epoch has


def content_of(dataset: Dataset, most: int = MAX_RECORDS) -> dict[str, Any]:
    """JSON for `find_difference`: number of samples, summaries of `most` of them, and digests of arrays.

    Checkpoints of cyxjax 0.2.0 have sums under "whole" instead of digests; these are not compared.
    """
    content = {"samples": len(dataset), "records": _records(dataset, most)}
    arrays = _arrays(dataset)
    if arrays is not None:
        content["bytes"] = [[_kind(leaf, len(dataset)), digest(leaf, rows)] for leaf, rows in arrays]
    return content


def digest(leaf: np.ndarray, rows: np.ndarray | None = None) -> str:
    """Digest of every byte of `leaf` and its place, or of `leaf[rows]`, which is copied slice by slice.

    The SHA-256 of the CRC-32 of slices of 1 MiB, computed by threads: 2.7 GB/s per thread.
    """
    count = len(leaf) if rows is None else len(rows)
    step = max(1, _SLICE_BYTES * len(leaf) // max(1, leaf.nbytes))

    def checksum(first: int) -> int:
        part = slice(first, first + step) if rows is None else rows[first : first + step]
        return zlib.crc32(np.ascontiguousarray(leaf[part]).reshape(-1).view(np.uint8).data)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        found = list(threads.map(checksum, range(0, count, step)))
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
    """(what differs, how it is in `a`, in `b`) of two contents; None if the parts in both agree.

    to_the_bit: False treats floats that differ by rounding as equal.
    """
    if a["samples"] != b["samples"]:
        return "the number of samples", str(a["samples"]), str(b["samples"])
    both = [name for name in a["records"] if name in b["records"]]
    # An augmentation may leave a sample as it is: a leaf that is random in one is not compared in any.
    records = [record or [] for content in (a, b) for record in content["records"].values()]
    random = {i for record in records for i, leaf in enumerate(record) if leaf == _RANDOM}
    fixed = lambda record: record and [leaf for i, leaf in enumerate(record) if i not in random]  # noqa: E731
    parts = {f"sample {name}": (fixed(a["records"][name]), fixed(b["records"][name])) for name in both}
    if "bytes" in a and "bytes" in b:
        one, other = ([s for s in c["bytes"] if to_the_bit or not _is_float(s)] for c in (a, b))
        parts["the bytes of all samples"] = one, other
    for what, (one, other) in parts.items():
        if one is not None and other is not None and len(one) == len(other):
            unlike = [pair for pair in zip(one, other, strict=True) if not _alike(*pair, to_the_bit)]
            one, other = ([pair[i] for pair in unlike] for i in (0, 1))
        if one != other:
            return what, _text(one), _text(other)
    return None


def drawn_anew(content: Mapping[str, Any]) -> list[str]:
    """Ids of the samples that differed when they were read twice."""
    return [name for name, record in content["records"].items() if _RANDOM in (record or [])]


def _records(dataset: Dataset, most: int) -> dict[str, list[Summary] | None]:
    """Summaries of the leaves of some samples by id; None for a sample that cannot be read."""
    start, count = time.monotonic(), len(dataset)
    shuffled = Order(count, seed=0, epoch=_EPOCH)[: min(count, most)]
    found: dict[str, list[Summary] | None] = {}
    for i in list(dict.fromkeys([0, count - 1, *shuffled.tolist()]))[:most]:
        if time.monotonic() - start > MAX_S:
            break
        found[str(i)] = _record(dataset, i)
    return found


def _record(dataset: Dataset, i: int) -> list[Summary] | None:
    try:
        first, second = ([leaf for _, leaf in leaves(dataset.take(np.array([i])))] for _ in range(2))
    except Exception:  # any error of a user's dataset: training reports it if it reads sample i
        return None
    same = [
        x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for x, y in zip(first, second, strict=True)
    ]
    return [_summary(x) if is_same else _RANDOM for x, is_same in zip(first, same, strict=True)]


def _summary(leaf: np.ndarray) -> Summary:
    """Type and shape, then the value of a single integer, or a checksum; for floats two sums before it."""
    kind, checksum = _kind(leaf, len(leaf)), zlib.crc32(np.ascontiguousarray(leaf).tobytes())
    if leaf.dtype.kind not in "fc":
        whole = leaf.size == 1 and leaf.dtype.kind in "iub"
        return [kind, int(leaf.reshape(-1)[0]) if whole else checksum]
    real = np.abs(leaf) if leaf.dtype.kind == "c" else leaf
    values = np.nan_to_num(real).astype(np.float64).reshape(-1)
    # Weights rise within 17 values, so that the same values in a different order give a different sum.
    total = values @ np.resize(np.arange(1.0, 18.0), values.size)
    size = float(np.abs(values).sum()) * 17
    # What the first sums do not show: values 17 places apart, phases, and NaN, which is no zero.
    flat = np.ascontiguousarray(leaf).reshape(-1)
    parts = flat.view(flat.real.dtype) if leaf.dtype.kind == "c" else flat
    irregular = 1 + 16 * (np.arange(parts.size) * _GOLDEN % 1.0)
    other = np.nan_to_num(parts).astype(np.float64) @ irregular
    nan = zlib.crc32(np.packbits(np.isnan(parts)).tobytes())
    return [kind, float(total), size, checksum, float(other), nan]


def _alike(a: Summary, b: Summary, to_the_bit: bool) -> bool:
    """Whether two summaries agree; floats from 0.2.0, without a checksum, within the tolerance."""
    if _RANDOM in (a, b):
        return True
    if min(len(a), len(b)) < 3 or (to_the_bit and min(len(a), len(b)) > 3):
        return a[0] == b[0] and (a[3:4] or a[1:]) == (b[3:4] or b[1:])
    room = _TOLERANCE * max(a[2], b[2])
    sums = zip((*a[1:3], *a[4:5]), (*b[1:3], *b[4:5]), strict=False)  # older checkpoints have fewer
    same_nan = min(len(a), len(b)) < 6 or a[5] == b[5]
    return a[0] == b[0] and same_nan and all(abs(x - y) <= room for x, y in sums)


def _is_float(summary: Summary) -> bool:
    return str(summary[0]).startswith(("float", "bfloat", "complex"))


def _text(summaries: list[Summary] | None) -> str:
    """`float32[1,64] 1523.4 20431.2 90125; int64[1] 7`."""
    return "cannot be read" if summaries is None else "; ".join(" ".join(map(str, s)) for s in summaries)
