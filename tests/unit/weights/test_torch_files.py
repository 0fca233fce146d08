"""A torch state_dict is read without torch; all other pickle content is refused and never executed."""

import io
import json
import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from cyxjax.errors import CheckpointError
from cyxjax.weights.read import read_weights

DATA = Path(__file__).parents[2] / "data"
STORED = DATA / "torch_state_dict.pt"  # torch 2.13: Conv2d(1, 2, 3), BatchNorm2d(2), Linear(32, 3)


def packed(path, pickled, **storages):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data.pkl", pickled)
        for name, data in storages.items():
            archive.writestr(f"net/data/{name}", data)
    return path


def test_arrays_are_torch_s_own():
    found = read_weights(STORED)
    assert found.kind == "torch"
    assert found.arrays["head.weight"].shape == (3, 32)
    expected = json.loads((DATA / "torch_state_dict.json").read_text())
    x = np.array(expected["x"], np.float32)  # (5, 4, 4, 1)
    get = {name: stored.read() for name, stored in found.arrays.items()}
    wide = np.pad(x[..., 0], ((0, 0), (1, 1), (1, 1)))
    views = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (1, 2))
    y = np.einsum("bijkl,okl->boij", views, get["conv.weight"][:, 0]) + get["conv.bias"][:, None, None]
    spread = np.sqrt(get["norm.running_var"] + 1e-5)[:, None, None]
    y = (y - get["norm.running_mean"][:, None, None]) / spread * get["norm.weight"][:, None, None]
    y = np.maximum(y + get["norm.bias"][:, None, None], 0).reshape(5, -1)
    np.testing.assert_allclose(y @ get["head.weight"].T + get["head.bias"], expected["y"], atol=1e-5)


class Runs:
    """A pickle that would create a file."""

    def __init__(self, call, *args):
        self.how = call, args

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("call", [os.system, eval, Path.touch, io.open])
def test_a_pickle_that_would_run_is_refused(tmp_path, protocol, call):
    mark = tmp_path / "ran"
    text = f"touch {mark}" if call is os.system else f"__import__('os').mkdir({str(mark)!r})"
    hostile = pickle.dumps({"weight": Runs(call, text)}, protocol)
    with pytest.raises(CheckpointError, match=r"x\.pt: .*pickle"):
        read_weights(packed(tmp_path / "x.pt", hostile))
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"weight": Runs(call, text)}, 4))
    with pytest.raises(CheckpointError, match=r"bare\.pt: "):
        read_weights(tmp_path / "bare.pt")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps({"a": Namespace(x=1)}, 4), "Namespace"),  # an object with a state, as torch.save(model)
        (pickle.dumps({"a": {1, 2}}, 4), "EMPTY_SET|ADDITEMS"),
        (pickle.dumps({"a": range(3)}, 4), "range"),
        (b"", ""),
        (b"\x80\x02.", ""),
        (b"\x80\x02(K\x01K\x02t", ""),  # no end
        (b"\x80\x02]q\x00h\x00a.", ""),  # a list in itself
    ],
)
def test_objects_are_refused_by_name_and_damaged_pickles(tmp_path, pickled, message):
    with pytest.raises(CheckpointError, match=f"(?s)pt: .*{message}"):
        read_weights(packed(tmp_path / "x.pt", pickled))


def tensor(*args):
    """A hand-made pickle of one tensor: (offset, shape, strides) over storage "0" of `size`."""
    offset, shape, strides, size = args
    number = lambda n: b"J" + n.to_bytes(4, "little", signed=True)  # noqa: E731
    parts = [b"\x80\x02}U\x01a", b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\n"]
    parts += [b"U\x010U\x03cpu", number(size), b"tQ", number(offset)]
    for dims in (shape, strides):
        parts += [b"(", *map(number, dims), b"t"]
    return b"".join([*parts, b"\x89Ntq\x00Rs."])


def test_a_tensor_by_hand_is_taken(tmp_path):
    storage = {"0": np.arange(6, dtype="<f4").tobytes()}
    path = packed(tmp_path / "x.pt", tensor(1, (2, 2), (1, 2), 6), **storage)
    np.testing.assert_array_equal(read_weights(path).arrays["a"].read(), [[1, 3], [2, 4]])


PLAIN = tensor(0, (2,), (1,), 2)
VALUE = PLAIN[6:-1]  # without the dict and the name "a"


@pytest.mark.parametrize(
    ("pickled", "named"),
    [
        (PLAIN.replace(b"\x89Nt", b"\x89N}U\x04conj\x88st"), "conj"),  # to be conjugated when it is read
        (b"\x80\x02}U\x010" + VALUE + b"K\x00" + VALUE + b".", "'0'"),  # "0" and 0
    ],
)
def test_a_tensor_of_other_numbers_and_two_of_one_name_are_refused(tmp_path, pickled, named):
    with pytest.raises(CheckpointError, match=named):
        read_weights(packed(tmp_path / "x.pt", pickled, **{"0": bytes(8)}))


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        ((1, (2, 2), (1, 2), 4), 4),  # reaches one element too far
        ((-1, (2,), (1,), 4), 4),
        ((0, (4,), (-1,), 4), 4),
        ((0, (-4,), (1,), 4), 4),
        ((0, (4,), (1,), 4), 3),  # the storage is smaller than said
        ((0, (4, 4), (1,), 4), 4),
        ((5, (0,), (1,), 4), 4),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, numbers, size):
    path = packed(tmp_path / "x.pt", tensor(*numbers), **{"0": bytes(4 * size)})
    tensor_at = read_weights(path).arrays["a"]
    with pytest.raises(CheckpointError, match=r"x\.pt: .*torch\.save"):
        tensor_at.read()


@pytest.mark.parametrize("missing", [30, STORED.stat().st_size // 2])
def test_a_file_that_was_cut_off_is_refused(tmp_path, missing):
    (tmp_path / "x.pt").write_bytes(STORED.read_bytes()[:-missing])
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / "x.pt")
