"""Leaves in pieces: their crc32 is that of the whole, and a missing or doubled element has no form."""

import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from cyxjax.checkpoint.arrays import Entry, StoredArrays, write_arrays, write_file
from cyxjax.checkpoint.manifest import Leaf
from cyxjax.checkpoint.pieces import Piece, file_of, find_gap, joined_crc32
from cyxjax.errors import CheckpointError, DamagedStep

BYTES = np.random.default_rng(0).bytes(4000)


@pytest.mark.parametrize("cuts", [[0, 1000], [0, 1, 999, 1000], [0, 250, 500, 750, 1000]])
def test_the_crc_of_pieces_is_that_of_the_whole(cuts):
    pieces = [
        Piece(i, a, b, zlib.crc32(BYTES[4 * a : 4 * b]))
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]
    assert joined_crc32(pieces, 4) == zlib.crc32(BYTES)
    assert find_gap(pieces, 1000) == ""


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([(0, 4), (5, 9)], "5 .*9 .*4"),
        ([(0, 4), (3, 9)], "3 .*9 .*4"),
        ([(1, 9)], "1 .*9 .*0"),
        ([(0, 8)], "8 .*9"),
        ([(0, 0), (0, 9)], "0 .*0 .*0"),
    ],
)
def test_pieces_that_leave_a_gap_or_overlap_are_no_leaf(spans, why):
    pieces = tuple(Piece(i, a, b, 0) for i, (a, b) in enumerate(spans))
    with pytest.raises(CheckpointError, match=rf"'w': \D*{why}"):
        Leaf.in_pieces("w", (3, 3), np.float32, pieces)


def in_pieces(folder, array, cuts):
    """The leaf `w`, written by as many processes as there are pieces."""
    flat, pieces = array.reshape(-1), []
    for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
        crc = write_file(folder / file_of(i), {"w": Entry.of(flat[a:b])}, {})["w"]
        pieces.append(Piece(i, a, b, crc))
    return Leaf.in_pieces("w", array.shape, array.dtype, tuple(pieces))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "complex64"])
def test_any_span_is_read_from_the_pieces_it_lies_in(tmp_path, monkeypatch, dtype):
    import ml_dtypes

    monkeypatch.setattr("cyxjax.checkpoint.arrays._BLOCK_BYTES", 48)  # many blocks a piece
    array = np.arange(120).reshape(8, 15).astype(getattr(ml_dtypes, dtype, None) or dtype)
    leaf = in_pieces(tmp_path, array, [0, 37, 90, 120])
    stored = StoredArrays(tmp_path, [leaf])
    assert stored.whole("w").tobytes() == array.tobytes()
    for a, b in [(0, 120), (0, 1), (36, 38), (37, 90), (89, 120), (50, 50)]:
        assert stored.part("w", a, b).tobytes() == array.reshape(-1)[a:b].tobytes()
    assert b"".join(block.tobytes() for block in stored.blocks("w")) == array.tobytes()


def test_more_files_than_a_process_may_open(tmp_path):
    array = np.arange(40, dtype=np.float32)
    leaf = in_pieces(tmp_path, array, list(range(41)))
    stored = StoredArrays(tmp_path, [leaf])
    assert stored.whole("w").tolist() == stored.part("w", 0, 40).tolist() == array.tolist()


def test_a_piece_that_was_altered_is_found_whatever_span_is_read(tmp_path):
    leaf = in_pieces(tmp_path, np.arange(10, dtype=np.float32), [0, 5, 10])
    path = tmp_path / file_of(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of element 9
    path.write_bytes(data)
    stored = StoredArrays(tmp_path, [leaf])
    assert stored.part("w", 0, 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DamagedStep, match="'w' .*crc32"):
        stored.part("w", 5, 6)


def test_an_array_nobody_said_was_written_is_refused(tmp_path):
    leaf = in_pieces(tmp_path, np.arange(10, dtype=np.float32), [0, 5, 10])
    (tmp_path / file_of(1)).unlink()
    write_file(tmp_path / file_of(1), {"w": Entry.of(np.zeros(9, np.float32))}, {})
    with pytest.raises(DamagedStep, match=r"'w' .*F32\(9,\).* float32\(5,\)"):
        StoredArrays(tmp_path, [leaf]).whole("w")


def test_safetensors_reads_what_is_written_a_block_at_a_time(tmp_path):
    blocks = [np.full((1, 3), i, np.float32) for i in range(4)]
    entries = {
        "a": Entry((4, 3), np.dtype(np.float32), lambda: blocks),
        "b": Entry.of(np.arange(3, dtype=np.int8)),  # would leave "a" unaligned if it came first
        "none": Entry.of(np.zeros((0, 2), np.int32)),
        "one": Entry.of(np.array(2.5)),
    }
    crc = write_file(tmp_path / "f", entries, {"k": "v"})
    found = safetensors.numpy.load_file(tmp_path / "f")
    assert found["a"].tobytes() == np.concatenate(blocks).tobytes()
    assert crc["a"] == zlib.crc32(np.concatenate(blocks).tobytes())
    assert (found["b"].tolist(), found["none"].shape, found["one"][()]) == ([0, 1, 2], (0, 2), 2.5)


def test_a_leaf_is_read_once_however_many_blocks_it_takes(tmp_path, monkeypatch):
    """safetensors reads the whole array for a slice of it: a gigabyte would have been read 256 times."""
    monkeypatch.setattr("cyxjax.checkpoint.arrays._BLOCK_BYTES", 4096)
    array = np.arange(250_000, dtype=np.float32)
    write_arrays(tmp_path / "arrays", {"a": array})
    stored = StoredArrays(tmp_path / "arrays", [Leaf("a", array.shape, "float32", zlib.crc32(array))])

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar: of all reads, cached or not

    before = bytes_read()
    np.testing.assert_array_equal(stored.part("a", 10, 250_000), array[10:])
    assert bytes_read() - before < 2 * array.nbytes  # in 245 blocks it was 245 times
