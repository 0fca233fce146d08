"""Seconds to save and restore the arrays of a checkpoint with orbax and with safetensors; files, bytes.

python scripts/bench/array_formats.py [--rounds 4]     alternates the formats; medians
"""

import argparse
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cyxjax.checkpoint import arrays, exporting
from cyxjax.checkpoint.manifest import Leaf, describe_file, file_of, list_files

SIZES = {"200 x 128 k numbers": (200, 131_072), "2,000 x 1,000": (2000, 1000), "12 x 8": (12, 8)}


def read_orbax(folder: Path, named: dict[str, np.ndarray]) -> object:
    import orbax.checkpoint as ocp

    del named
    return ocp.PyTreeCheckpointer().restore(folder)


def write_ours(folder: Path, named: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    entries = {name: arrays.Entry.of(array) for name, array in named.items()}
    arrays.write_file(folder / file_of(0), entries, {"format": "np"})


def read_ours(folder: Path, named: dict[str, np.ndarray]) -> object:
    leaves = [Leaf.of(name, array, zlib.crc32(array)) for name, array in named.items()]
    stored = arrays.StoredArrays(folder, leaves)
    return {leaf.name: stored.whole(leaf.name) for leaf in leaves}


FORMATS: dict[str, tuple[Callable, Callable]] = {
    "orbax": (exporting.to_orbax, read_orbax),
    "safetensors": (write_ours, read_ours),
}


def timed(write: Callable, read: Callable, named: dict[str, np.ndarray]) -> tuple[float, float, int, int]:
    """(seconds to save, with fsync and checksums; seconds to restore; files; bytes)."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "arrays"
        begun = time.perf_counter()
        write(folder, named)
        files = [describe_file(folder, path) for path in list_files(folder)]
        saved = time.perf_counter()
        read(folder, named)
        restored = time.perf_counter()
        shutil.rmtree(folder)
    return saved - begun, restored - saved, len(files), sum(file.num_bytes for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    print(
        "| arrays | format | save, s | restore, s | files | MB |\n| --- | --- | ---: | ---: | ---: | ---: |"
    )
    for label, (count, size) in SIZES.items():
        rng = np.random.default_rng(0)
        named = {f"params/Block_{i}/kernel": rng.random(size, np.float32) for i in range(count)}
        found: dict[str, list] = {name: [] for name in FORMATS}
        for _ in range(rounds):
            for name, (write, read) in FORMATS.items():
                found[name].append(timed(write, read, named))
        for name, rows in found.items():
            save, restore, files, num_bytes = (
                statistics.median(column) for column in zip(*rows, strict=True)
            )
            print(f"| {label} | {name} | {save:.3f} | {restore:.3f} | {files:.0f} | {num_bytes / 1e6:.2f} |")


if __name__ == "__main__":
    main()
