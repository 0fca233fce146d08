"""Arrays in files: any span is read from the pieces that have it, each byte is checked; the cost."""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from cyxjax.checkpoint.arrays import Entry, StoredArrays, write_file
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import Leaf, Piece, file_of, read_manifest
from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.checkpoint.tree import host_copy, refuse_unsavable
from cyxjax.errors import CheckpointError, DamagedStep
from tests.support.calls import calls_of


@pytest.mark.parametrize(
    "spans",
    [[(0, 4), (5, 9)], [(0, 4), (3, 9)], [(1, 9)], [(0, 8)], [(0, 0), (0, 9)]],
    ids=["gap", "overlap", "start", "end", "empty"],
)
def test_pieces_that_leave_a_gap_or_overlap_are_no_leaf(spans):
    pieces = tuple(Piece(i, a, b, 0) for i, (a, b) in enumerate(spans))
    with pytest.raises(CheckpointError, match=rf"'w': .*\({spans[0][0]}, {spans[0][1]}\).* 9 "):
        Leaf("w", (3, 3), "float32", 0, pieces)


def in_pieces(folder, array, cuts):
    """The leaf `w`, written by one process per piece."""
    flat, pieces = array.reshape(-1), []
    for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
        crc = write_file(folder / file_of(i), {"w": Entry.of(flat[a:b])}, {})["w"]
        pieces.append(Piece(i, a, b, crc))
    return Leaf("w", array.shape, array.dtype.name, 0, tuple(pieces))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "complex64"])
def test_any_span_is_read_from_the_pieces_it_lies_in_and_only_from_good_ones(tmp_path, monkeypatch, dtype):
    import ml_dtypes

    monkeypatch.setattr("cyxjax.checkpoint.arrays._BLOCK_BYTES", 48)  # many blocks per piece
    array = np.arange(120).reshape(8, 15).astype(getattr(ml_dtypes, dtype, None) or dtype)
    leaf = in_pieces(tmp_path, array, [0, 37, 90, 120])
    stored = StoredArrays(tmp_path, {"w": leaf})
    assert stored.whole("w").tobytes() == array.tobytes()
    for a, b in [(0, 120), (0, 1), (36, 38), (37, 90), (89, 120), (50, 50)]:
        assert stored.part("w", a, b).tobytes() == array.reshape(-1)[a:b].tobytes()
    assert b"".join(block.tobytes() for block in stored.blocks("w")) == array.tobytes()
    path = tmp_path / file_of(1)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")  # of element 89
    assert stored.part("w", 0, 37).tobytes() == array.reshape(-1)[:37].tobytes()
    with pytest.raises(DamagedStep, match="'w' .*crc32"):
        stored.part("w", 37, 38)  # in the altered piece


def test_safetensors_reads_what_is_written(tmp_path):
    a = np.arange(12, dtype=np.float32).reshape(3, 4).T
    entries = {
        "a": Entry(a.shape, a.dtype, lambda: a),
        "b": Entry.of(np.arange(3, dtype=np.int8)),  # would leave "a" unaligned if it came first
        "none": Entry.of(np.zeros((0, 2), np.int32)),
        "one": Entry.of(np.array(2.5)),
    }
    crc = write_file(tmp_path / "f", entries, {"k": "v"})
    found = safetensors.numpy.load_file(tmp_path / "f")
    assert found["a"].tobytes() == a.tobytes()
    assert crc["a"] == zlib.crc32(a.tobytes())
    assert (found["b"].tolist(), found["none"].shape, found["one"][()]) == ([0, 1, 2], (0, 2), 2.5)


def test_a_leaf_is_read_once_however_many_blocks_it_takes(tmp_path, monkeypatch):
    """safetensors reads a whole array for a slice of it: a gigabyte would be read 256 times."""
    monkeypatch.setattr("cyxjax.checkpoint.arrays._BLOCK_BYTES", 4096)
    array = np.arange(250_000, dtype=np.float32)
    stored = StoredArrays(tmp_path, {"w": in_pieces(tmp_path, array, [0, array.size])})

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar: of all reads, cached or not

    before = bytes_read()
    np.testing.assert_array_equal(stored.part("w", 10, 250_000), array[10:])
    assert bytes_read() - before < 2 * array.nbytes  # was 245 times with 245 blocks


def calls_of_save(folder, num_leaves):
    store = StepStore(folder, is_writer=True)
    leaves = {f"leaf_{i}": np.full(3, i, np.float32) for i in range(num_leaves)}

    def save(step):
        refuse_unsavable(leaves)
        store.write(Snapshot(step, host_copy(leaves), {}, None))

    for step in (1, 2):  # warm-up: a save reads the manifests of those before it
        save(step)
    calls = calls_of(lambda: save(3))
    assert read_manifest(step_folder(folder, 3)).versions["numpy"] == np.__version__
    return calls


def test_a_save_and_each_of_its_leaves_cost_few_calls(tmp_path):
    """A save runs concurrently with the steps, on the same cores."""
    few, many = calls_of_save(tmp_path / "few", 10), calls_of_save(tmp_path / "many", 110)
    assert few < 2000  # 29,000 when each save read the package metadata
    # 69 when this was written; 91 with dtypes named for each leaf, 316 with checks of a protocol.
    assert (many - few) / 100 < 85


def test_a_save_syncs_each_file_and_folder_once_before_it_is_a_step(tmp_path, monkeypatch):
    # Each waits for the disk, some 5 ms, and the end of a run for all of them; the folder was synced twice.
    steps, done, rename, sync = StepStore(tmp_path, is_writer=True), [], Path.rename, os.fsync

    def synced(fd):
        done.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda *paths: done.append("renamed") or rename(*paths))
    steps.write(Snapshot(1, {"a": np.zeros(2, np.float32)}, {}, None))
    parts = [step_folder(tmp_path, 1), *step_folder(tmp_path, 1).rglob("*")]
    assert len(parts) == 4  # itself, the manifest, the folder of arrays and their file
    assert sorted(done[:-2]) == sorted(path.stat().st_ino for path in parts)
    assert done[-2:] == ["renamed", tmp_path.stat().st_ino]
