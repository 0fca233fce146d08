"""Digests of a run's whole state, every N steps and at each save, one line each in `bits.jsonl`.

`cyxjax hash RUN RUN` compares two runs by them; a checkpoint whose arrays have different digests is refused.

`{"step": 100, "digests": {"params/Dense_0/kernel": "5f1c...", ...}}`; `{"begin": 100}` where a run continues
from step 100: earlier lines about later steps belong to a course that was abandoned.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from cyxjax.checkpoint.arrays import StoredArrays
from cyxjax.checkpoint.folders import ARRAYS, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.files import read_json_lines


def read_digests(path: Path) -> dict[int, dict[str, str]]:
    """Digests by step and leaf, of the final course of the run; {} without such a file."""
    try:
        lines = read_json_lines(path)
    except OSError:
        return {}
    found: dict[int, dict[str, str]] = {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # a line that cyxjax did not write
            if "begin" in line:
                found = {step: leaves for step, leaves in found.items() if step <= line["begin"]}
            else:
                found[int(line["step"])] = dict(line["digests"])
    return found


def contradicted_leaves(directory: Path, step: int, path: Path) -> list[str]:
    """Names of the leaves of a stored step whose digest differs from the one in the file at `path`.

    Raises: DamagedStep if the step cannot be read.
    """
    recorded = read_digests(path).get(step, {})
    folder = step_folder(directory, step)
    manifest = read_manifest(folder)
    stored = StoredArrays(folder / ARRAYS, manifest.leaf_of)
    known = [leaf for leaf in manifest.leaves if leaf.name in recorded]
    return [x.name for x in known if leaf_digest(stored.blocks(x.name), x.size) != recorded[x.name]]


def leaf_digest(blocks: Iterable[np.ndarray], size: int) -> str:
    """The digest of an array of `size` elements, given in C order in flat parts; on the host.

    The two sums of core/sentinel.py, modulo 2^32.
    """
    plain, hashed, start = 0, 0, 0
    for block in blocks:
        parts = (block.real, block.imag) if np.iscomplexobj(block) else (block,)
        for i, part in enumerate(parts):
            width = min(part.dtype.itemsize, 4)
            bits = np.ascontiguousarray(part).view(f"u{width}").astype(np.uint32)
            first = (start + i * size) * (part.dtype.itemsize // width)
            places = np.arange(first, first + bits.size, dtype=np.uint64).astype(np.uint32)
            mixed = bits * (places * np.uint32(2) + np.uint32(1))
            mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
            plain += int(bits.sum(dtype=np.uint64))
            hashed += int((mixed ^ (mixed >> 13)).sum(dtype=np.uint64))
        start += block.size
    return f"{plain % 2**32:08x}{hashed % 2**32:08x}"
