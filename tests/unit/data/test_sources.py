"""Sources: samples in all supported containers, read by index; errors that name the sample."""

import gzip
import io
import tarfile
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cyxjax.data import sources
from cyxjax.data.sources import ArrayDataset, Dataset, Mixture, as_batches, as_dataset
from cyxjax.data.streams import RowBatches, Rows
from cyxjax.data.tar_shards import TarShards
from cyxjax.errors import ConfigError, DataError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6, dtype=np.int32)
WANTED = np.array([4, 0, 4])
ARRAY = np.random.default_rng(0).normal(size=(40, 6, 5))


class Items:
    """Like a torch Dataset: one (x, y) at a time."""

    def __init__(self, size=6):
        self.size, self.threads = size, set()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        if index == 5:
            raise FileNotFoundError("img_5.png")
        return X[index], Y[index]


class Together(Items):
    """Like a torch Subset."""

    def __getitems__(self, indices):
        raise NotImplementedError  # as torch's, of a subclass of Subset that overrides only __getitem__


class Tensor:
    """The part of a torch tensor that we use: `detach` and `cpu`, and then the numpy protocol."""

    shape, dtype, __array__ = (6, 2), "torch.float32", None

    def __init__(self, array):
        self.array = array

    def detach(self):
        return SimpleNamespace(cpu=lambda: self.array)


class Tensors(Items):
    """Like torch's TensorDataset: read in one call, not item by item."""

    tensors = Tensor(X), Tensor(Y)


class Table:
    """The part of a Hugging Face dataset that we use; its take(n) differs from ours."""

    column_names, take = ("image", "label"), None

    def __init__(self, kind=None):
        self.format = {"type": kind}

    def __len__(self):
        return 6

    def with_format(self, kind):
        return Table(kind)

    def __getitem__(self, indices):
        assert (self.format["type"], type(indices)) == ("numpy", list)
        return {"image": X[indices], "label": Y[indices]}


class Transformed(Table):
    """A Hugging Face dataset with a transform, which another format would replace."""

    def __init__(self):
        super().__init__("custom")

    def __getitem__(self, indices):
        return {"image": X[indices], "label": Y[indices]}


class Selected(Table):
    """A Hugging Face dataset whose format selects columns."""

    def __init__(self):
        self.format = {"type": "torch", "columns": ["image", "label"], "output_all_columns": False}

    def with_format(self, kind, columns, output_all_columns):
        assert (columns, output_all_columns) == (["image", "label"], False)
        return Table(kind)


class Stream(Table):
    """A streamed Hugging Face dataset, which lacks some methods."""

    __len__ = None


def mapped(path):
    np.save(path / "x.npy", X)
    return np.load(path / "x.npy", mmap_mode="r"), Y


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        {"image": X, "label": Y},
        {"y": Y, "features": X},
        (X.tolist(), Y.tolist()),
        Items(),
        Together(),
        list(zip(X, Y, strict=True)),
        [[x, y] for x, y in zip(X, Y, strict=True)],
        [{"x": x, "targets": y} for x, y in zip(X, Y, strict=True)],
        Table(),
        Transformed(),
        Selected(),
        ArrayDataset(X, Y),
        Tensors(),
        mapped,
    ],
    ids=lambda data: type(data).__name__,
)
def test_every_kind_reads_the_same(data, tmp_path):
    data = data(tmp_path) if data is mapped else data
    dataset = as_dataset(data)
    inputs, targets = dataset.take(WANTED)
    assert len(dataset) == 6
    assert np.array_equal(inputs, [[8, 9], [0, 1], [8, 9]])
    assert np.array_equal(targets, [4, 0, 4])
    if type(data) is tuple and isinstance(data[0], np.memmap):
        assert dataset.inputs is data[0]  # it stays on disk


def test_named_columns_are_chosen():
    data = {"a": X, "b": X[:, 0], "label": Y, "weight": Y * 2}
    inputs, targets = as_dataset(data, inputs=["a", "b"], targets="weight").take(WANTED)
    assert set(inputs) == {"a", "b"}
    assert targets.tolist() == [8, 0, 8]
    with pytest.raises(DataError, match="'labels'.* 'label'"):
        as_dataset(data, inputs="a", targets="labels")


def test_inputs_alone_are_their_own_targets_and_several_are_a_tuple():
    for dataset in (as_dataset(X), as_dataset(list(X)), as_dataset({"x": X})):
        inputs, targets = dataset.take(WANTED)
        assert targets is inputs
        assert np.array_equal(inputs, X[WANTED])
    inputs, targets = as_dataset((X, X + 1, Y)).take(WANTED)
    assert [part.shape for part in inputs] == [(3, 2), (3, 2)]
    assert targets.tolist() == [4, 0, 4]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_an_error_names_the_item(num_workers):
    items = Items()
    dataset = as_dataset(items, num_workers=num_workers)
    with pytest.raises(DataError, match=r"item 5 of Items raised FileNotFoundError: img_5.png") as caught:
        dataset.take(np.array([1, 5, 2]))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    del caught  # its traceback holds the dataset, whose threads end with it
    assert all(name.startswith("cyxjax-data") for name in items.threads) == (num_workers > 0)


def test_a_list_is_a_tuple_if_it_holds_arrays_and_else_one_array():
    # The shapes are equal: read as one array, the pair would be an autoencoder's sample.
    inputs, targets = as_dataset([[x, x + 1] for x in X]).take(np.array([2]))
    np.testing.assert_array_equal(inputs + 1, targets)
    inputs, targets = as_dataset([[x.tolist(), x.tolist()] for x in X]).take(np.array([2]))
    assert (targets is inputs, inputs.shape) == (True, (1, 2, *X.shape[1:]))
    (inputs, targets), *_ = RowBatches(Rows([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), 2, 0, 1)
    assert (targets is inputs, inputs.shape) == (True, (2, 3))  # of a stream too


def test_items_that_do_not_stack_are_refused():
    ragged = [(np.zeros(3), 0), (np.zeros(3), 1), (np.zeros(4), 2)]
    mixed = [{"a": 1, "b": 2, "y": 0}, {"a": 1, "y": 0}]
    longer = [((1, 2), 0), ((1, 2, 3), 0)]
    uneven = [[[1, 2], [3]], [[4], [5, 6]]]
    for items, named in (
        (ragged, r"sample 2 .*4.* sample 1 .*3"),
        (mixed, r"sample 1 .* sample 0 .*'b'"),
        ([({"a": 1}, 0), ({"a": 1, "b": 2}, 0)], r"sample 1 .*'b'.* sample 0 "),
        (longer, r"sample 1 .*\[2\].* sample 0 "),
        (uneven, ""),
    ):
        with pytest.raises(DataError, match=named + r".*\(input, target\)"):
            as_dataset(items).take(np.array([0, 1, len(items) - 1]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:5]), "inputs .*6.* targets .*5"),
        ({"a": X, "b": X[:3], "y": Y}, r"inputs\['a'\] .*6.* inputs\['b'\] .*3"),
        ((X[:0], Y[:0]), "0 samples"),
        ([], "0 samples"),
        (np.array(3.0), "inputs .*number"),
        ((X, np.array(list("abcdef"))), "'a'.*np.unique"),
        ((X, np.array([*"abcde", None], object)), "'a'.*np.unique"),
        ((X, np.array([1, 2, 3, 4, 5, None], object)), "None"),
        ((X, np.array(list("abcdef"), "S1")), "b'a'.*np.unique"),
        ((np.ma.masked_array(X, X > 0), np.arange(6)), "masked array.*filled"),
        (list(zip(X, "abcdef", strict=True)), "'e'.*np.unique"),
        ([(x, None if y == 4 else y) for x, y in zip(X, Y, strict=True)], "None"),
        ({1, 2}, "^set .*cx.data.Batches"),
        (Stream(), "^Stream .*cx.data.Batches"),
        ("data.csv", "^str .*cx.load_dataset"),
        (Path("d.npz"), "cx.load_dataset"),
        (Items(0), "0 samples"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        as_dataset(data).take(WANTED)


def test_batches_of_a_loader_become_numpy():
    loader = [[Tensor(X), Tensor(Y)], (X, Y), {"image": X, "label": Y}]
    for inputs, targets in as_batches(loader):
        assert type(inputs) is type(targets) is np.ndarray
        assert np.array_equal(inputs, X)
        assert np.array_equal(targets, Y)
    ((inputs, targets),) = as_batches([X])
    assert targets is inputs
    # Torch's collation makes lists of inner tuples too; as one array, two samples would have mixed inputs.
    (((one, other), _),) = as_batches([[[Tensor(X[:2]), Tensor(X[2:4])], Tensor(Y[:2])]])
    np.testing.assert_array_equal([one, other], [X[:2], X[2:4]])
    pair = [Tensor(X[:2]), Tensor(X[2:4])]
    ((((_, deep), _), _),) = as_batches([[[pair, pair], Tensor(Y[:2])]])
    np.testing.assert_array_equal(deep, X[2:4])
    for odd, message in ((None, "None"), ((X[:0], Y[:0]), "0 samples")):
        with pytest.raises(DataError, match=f"batch 3 .*{message}"):
            list(as_batches([*loader, odd]))


def unaligned(whole, path):
    return np.frombuffer(b"x" + whole.tobytes(), np.uint8)[1:].view(np.float32).reshape(-1, 4)


def memmap(whole, path):
    whole.tofile(path)
    return np.memmap(path, np.float32, "r", shape=whole.shape)


@pytest.mark.parametrize(
    "kind",
    [
        lambda whole, path: whole,
        lambda whole, path: np.asfortranarray(whole),
        lambda whole, path: np.repeat(whole, 2, 0)[::2],
        lambda whole, path: whole.astype(">f4"),
        unaligned,
        memmap,
    ],
)
def test_rows_are_what_indexing_gives_and_no_array_is_copied_whole(kind, tmp_path):
    whole = np.arange(4_000_000, dtype=np.float32).reshape(1_000_000, 4)
    picked = np.array([3, 400_000, 3, 0])
    data = ArrayDataset(kind(whole, tmp_path / "whole"), np.zeros(len(whole)))
    data.take(picked)
    tracemalloc.start()
    inputs, _ = data.take(picked)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000
    assert type(inputs) is np.ndarray
    assert inputs.tolist() == whole[picked].tolist()


@pytest.mark.parametrize("array", [ARRAY, ARRAY[:, ::2], ARRAY.astype(">f4"), ARRAY[:, 0, 0] > 0])
def test_threads_gather_the_rows_that_indexing_gives(monkeypatch, array):
    monkeypatch.setattr(sources, "LARGE_BYTES", 0)
    monkeypatch.setattr(sources.os, "cpu_count", lambda: 8)
    for indices in ([3, 3, 39, 0, 17], range(40), [-1, -40, 5], [7]):
        found = sources.gathered_rows(array, np.array(indices))
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array[indices])
    for place in (40, -41):
        with pytest.raises(IndexError):
            sources.gathered_rows(array, np.array([0, place]))
    monkeypatch.undo()
    monkeypatch.setattr(sources, "ThreadPoolExecutor", None)  # cannot be called
    assert len(sources.gathered_rows(array, np.arange(9))) == 9  # few rows start no threads


def numbered(first, count):
    x = np.arange(first, first + count, dtype=np.float32)
    return x[:, None], x.astype(np.int32)


def test_a_mixture_holds_its_shares_everywhere():
    mixed = Mixture([numbered(0, 1000), numbered(1000, 10)], [3, 1], num_samples=4000)
    assert isinstance(mixed, Dataset)
    inputs, targets = mixed.take(np.arange(4000))
    np.testing.assert_array_equal(inputs[:, 0], targets)
    small = targets >= 1000
    assert small.mean() == pytest.approx(0.25, abs=0.001)
    assert small[500:600].sum() == pytest.approx(25, abs=3)
    assert np.bincount(targets[small] - 1000).tolist() == pytest.approx([100] * 10, abs=1)  # in turns
    assert np.bincount(targets[~small]).tolist() == pytest.approx([3] * 1000, abs=1)
    order = np.array([7, 3999, 7, 0])
    np.testing.assert_array_equal(mixed.take(order)[1], targets[order])
    for weights in ([1], [1, 0], [1, -1]):
        with pytest.raises(ConfigError, match=r"weights \[1"):
            Mixture([numbered(0, 3), numbered(0, 3)], weights)


def shard(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_shards_are_one_data_set(tmp_path):
    for number in range(2):
        rows = range(3 * number, 3 * number + 3)
        members = {f"a/{i:03}.npy": npy(np.full(2, i, np.float32)) for i in rows}
        members |= {f"a/{i:03}.cls": str(i).encode() for i in rows} | {"a/README": b"no sample"}
        shard(tmp_path / f"train-{number}.tar", members)
    shard(tmp_path / "x[1].tar", members)  # a file whose name is a pattern for another
    assert len(TarShards(tmp_path / "x[1].tar", "npy")) == 3
    data = as_dataset(TarShards(tmp_path / "train-*.tar", "npy"), num_workers=2)
    assert len(data) == 6
    inputs, targets = data.take(np.array([5, 0, 3]))
    np.testing.assert_array_equal(inputs, [[5, 5], [0, 0], [3, 3]])
    assert targets.tolist() == [5, 0, 3]


@pytest.mark.parametrize(
    ("name", "member", "message"),
    [
        ("none-*.tar", "npy", r"none-\*\.tar"),
        ("odd.tar", "jpg", r"odd\.tar: .*'1'.*'jpg'"),
        ("odd.tar", "npy", r"'npy' of .*odd\.tar"),
        ("odd.tar", "odd.bin", r"'odd\.bin' .*npy"),
        ("zipped.tar", "npy", r"zipped\.tar: .*unpack \.tar\.gz"),
    ],
)
def test_what_is_no_shard_or_no_sample_of_it_is_named(tmp_path, name, member, message):
    bad = shard(tmp_path / "odd.tar", {"1.npy": b"junk", "1.cls": b"x"})
    (tmp_path / "zipped.tar").write_bytes(gzip.compress(bad.read_bytes()))
    with pytest.raises(DataError, match=message):
        TarShards(tmp_path / name, member)[0]


@pytest.mark.parametrize("length", [1024, 1536, 2048, 2049, 2559])  # 2,048: of the members and their headers
def test_a_shard_without_its_end_is_refused(tmp_path, length):
    path = shard(tmp_path / "a.tar", {"1.bin": b"0123456789", "1.cls": b"1"})
    assert len(TarShards(path, "cls", None)) == 1
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match=r"a\.tar: "):
        TarShards(path, "cls", None)


def test_a_shard_that_was_cut_short_is_refused(tmp_path):
    path = shard(tmp_path / "a.tar", {"1.bin": b"0123456789", "1.cls": b"1"})
    opened = TarShards([path], ["bin"], None, decode={"bin": bytes})
    assert opened[0] == {"bin": b"0123456789"}
    path.write_bytes(path.read_bytes().partition(b"56789")[0])
    with pytest.raises(DataError, match=r"'bin' of .*a\.tar"):
        opened[0]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE])
def test_a_tar_member_whose_bytes_are_elsewhere_is_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("00000.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"7"))
        other = tarfile.TarInfo("00001.cls")
        other.type, other.linkname = kind, "00000.cls"
        archive.addfile(other)
    with pytest.raises(DataError, match=r"00001\.cls"):
        TarShards(tmp_path / "x.tar", "cls", None)
