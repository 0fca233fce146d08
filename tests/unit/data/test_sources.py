"""Sources: whatever people keep samples in, read by index; errors that name the sample."""

import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cyxjax.data.sources import ArrayDataset, ItemDataset, as_batches, as_dataset
from cyxjax.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6, dtype=np.int32)
WANTED = np.array([4, 0, 4])


def assert_takes_pairs(dataset):
    inputs, targets = dataset.take(WANTED)
    assert len(dataset) == 6
    assert np.array_equal(inputs, [[8, 9], [0, 1], [8, 9]])
    assert np.array_equal(targets, [4, 0, 4])


class Items:
    """As a torch Dataset: one (x, y) at a time."""

    def __init__(self, size=6):
        self.size, self.threads = size, set()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        if index == 5:
            raise FileNotFoundError("img_5.png")
        return X[index], Y[index]


class Tensor:
    """What we use of a torch tensor: detach, cpu and the numpy protocol."""

    shape, dtype = (6, 2), "torch.float32"

    def __init__(self, array):
        self.array, self.calls = array, []

    def detach(self):
        self.calls.append("detach")
        return self

    def cpu(self):
        self.calls.append("cpu")
        return self

    def __array__(self, dtype=None, copy=None):
        assert self.calls == ["detach", "cpu"]
        return self.array


class Tensors(Items):
    """As torch's TensorDataset: read in one call, not item by item."""

    def __init__(self):
        super().__init__()
        self.tensors = Tensor(X), Tensor(Y)

    def __getitem__(self, index):
        raise AssertionError("read through .tensors")


class Table:
    """What we use of a Hugging Face dataset."""

    column_names = ("image", "label")

    def __init__(self, format=None):
        self.format = format

    def __len__(self):
        return 6

    def with_format(self, format):
        return Table(format)

    def take(self, n):
        raise AssertionError("its take(n) is another function than ours")

    def __getitem__(self, indices):
        assert self.format == "numpy"
        assert isinstance(indices, list)
        return {"image": X[indices], "label": Y[indices]}


class Stream(Table):
    """What a streamed Hugging Face dataset lacks."""

    __len__ = None

    def __iter__(self):
        return iter(())


class Frame:
    """What we use of a pandas data frame."""

    columns = ("label", "width")

    def __len__(self):
        return 6

    def to_numpy(self):
        raise AssertionError("columns are read one by one: one array would lose their dtypes")

    def __getitem__(self, name):
        column = Y if name == "label" else X[:, 0]
        return type("Series", (), {"to_numpy": lambda self: column})()


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        {"image": X, "label": Y},
        {"y": Y, "features": X},
        (X.tolist(), Y.tolist()),
        Items(),
        list(zip(X, Y, strict=True)),
        [{"x": x, "targets": y} for x, y in zip(X, Y, strict=True)],
        Table(),
        ArrayDataset(X, Y),
        Tensors(),
    ],
    ids=[
        "tuple",
        "dict",
        "dict_y",
        "lists",
        "items",
        "list_of_pairs",
        "list_of_dicts",
        "hf",
        "dataset",
        "tensors",
    ],
)
def test_every_kind_reads_the_same(data):
    assert_takes_pairs(as_dataset(data))


def test_a_memmap_stays_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    dataset = as_dataset((mapped, Y))
    assert isinstance(dataset, ArrayDataset)
    assert dataset.inputs is mapped
    assert_takes_pairs(dataset)


def test_jax_arrays_are_arrays():
    jax_numpy = pytest.importorskip("jax.numpy")
    assert_takes_pairs(as_dataset((jax_numpy.asarray(X), jax_numpy.asarray(Y))))


def test_a_frame_gives_named_columns():
    inputs, targets = as_dataset(Frame()).take(WANTED)
    assert inputs.tolist() == [8, 0, 8]
    assert targets.tolist() == [4, 0, 4]


def test_named_columns_are_chosen():
    data = {"a": X, "b": X[:, 0], "label": Y, "weight": Y * 2}
    inputs, targets = as_dataset(data, inputs=["a", "b"], targets="weight").take(WANTED)
    assert set(inputs) == {"a", "b"}
    assert targets.tolist() == [8, 0, 8]
    with pytest.raises(DataError, match="'labels'.* 'label'"):
        as_dataset(data, inputs="a", targets="labels")


def test_a_table_column_of_words_or_of_unequal_rows_is_refused():
    class Words(Table):
        def with_format(self, format):
            return self

        def __getitem__(self, indices):
            return {"image": np.array(["a", "b", "c"], dtype=object), "label": Y[indices]}

    with pytest.raises(DataError, match="np.unique"):
        as_dataset(Words()).take(WANTED)


def test_inputs_alone_are_their_own_targets():
    for dataset in (as_dataset(X), as_dataset(list(X)), as_dataset({"x": X})):
        inputs, targets = dataset.take(WANTED)
        assert targets is inputs
        assert np.array_equal(inputs, X[WANTED])


def test_several_inputs():
    inputs, targets = as_dataset((X, X + 1, Y)).take(WANTED)
    assert [part.shape for part in inputs] == [(3, 2), (3, 2)]
    assert targets.tolist() == [4, 0, 4]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_items_are_read_in_order_and_an_error_names_the_item(num_workers):
    items = Items()
    dataset = as_dataset(items, num_workers=num_workers)
    assert_takes_pairs(dataset)
    with pytest.raises(DataError, match=r"item 5 of Items raised FileNotFoundError: img_5.png") as caught:
        dataset.take(np.array([1, 5, 2]))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert all(name.startswith("cyxjax-data") for name in items.threads) == (num_workers > 0)
    dataset.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("cyxjax-data")]
    assert_takes_pairs(dataset)  # closed: reads on, in this thread


def test_items_are_fetched_together_where_the_source_can():
    class Batched(Items):
        def __getitems__(self, indices):
            assert indices == [4, 0, 4]
            return [(X[i], Y[i]) for i in indices]

    assert_takes_pairs(ItemDataset(Batched()))


def test_items_that_do_not_stack_are_refused():
    ragged = [(np.zeros(3), 0), (np.zeros(3), 1), (np.zeros(4), 2)]
    mixed = [{"a": 1, "b": 2, "y": 0}, {"a": 1, "y": 0}]
    lists = [[x, y] for x, y in zip(X, Y, strict=True)]  # torch's tuples are tuples; a list is one array
    for items in (ragged, mixed, lists):
        with pytest.raises(DataError, match=r"\(input, target\)"):
            as_dataset(items).take(np.array([0, 1, len(items) - 1]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:5]), "inputs .*6.* targets .*5"),
        ({"a": X, "b": X[:3], "y": Y}, r"inputs\['a'\] .*6.* inputs\['b'\] .*3"),
        ((X[:0], Y[:0]), "inputs has 0"),
        ([], "0 samples"),
        (np.array(3.0), "inputs .*number"),
        ((list("abcdef"), Y), "'a'.*np.unique"),
        ((X, np.array(list("abcdef"))), "'a'.*np.unique"),
        ((X, np.array([*"abcde", None], object)), "'a'.*np.unique"),
        ((X, np.array([1, 2, 3, 4, 5, None], object)), "None"),
        ((X, np.array(list("abcdef"), "S1")), "b'a'.*np.unique"),
        ({1, 2}, "^set .*cx.data.Batches"),
        (Stream(), "^Stream .*cx.data.Batches"),
        ("data.csv", r"load_dataset\('csv', 'data.csv'\)"),
        (Path("d.npz"), r"load_dataset\('npz', 'd.npz'\)"),
        (object(), "^object .*__getitem__"),
        (Items(0), "0 samples"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        as_dataset(data)


def test_batches_of_a_loader_become_numpy():
    loader = [[Tensor(X), Tensor(Y)], (X, Y), {"image": X, "label": Y}]
    for inputs, targets in as_batches(loader):
        assert type(inputs) is type(targets) is np.ndarray
        assert np.array_equal(inputs, X)
        assert np.array_equal(targets, Y)
    ((inputs, targets),) = as_batches([X])
    assert targets is inputs


@pytest.mark.parametrize("kind", ["rows", "columns", "every other", "big-endian", "unaligned", "memmap"])
def test_rows_are_what_indexing_gives_and_no_array_is_copied_whole(kind, tmp_path):
    whole = np.arange(4_000_000, dtype=np.float32).reshape(1_000_000, 4)
    if kind == "columns":
        whole = np.asfortranarray(whole)
    elif kind == "every other":
        whole = whole[::2]
    elif kind == "big-endian":
        whole = whole.astype(">f4")
    elif kind == "unaligned":
        whole = np.frombuffer(b"x" + whole.tobytes(), np.uint8)[1:].view(np.float32).reshape(-1, 4)
    elif kind == "memmap":
        whole.tofile(tmp_path / "whole")
        whole = np.memmap(tmp_path / "whole", np.float32, "r", shape=whole.shape)
    picked = np.array([3, 400_000, 3, 0])
    data = ArrayDataset(whole, np.zeros(len(whole)))
    data.take(picked)
    tracemalloc.start()
    inputs, _ = data.take(picked)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000
    assert type(inputs) is np.ndarray
    values = 8 if kind == "every other" else 4
    assert inputs.tolist() == [[values * i + c for c in range(4)] for i in picked]
