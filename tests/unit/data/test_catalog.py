"""Data sets by name: real data that is here, splits that never change, errors that name file and field."""

import gzip
import struct
import sys

import numpy as np
import pytest

from cyxjax.data import catalog
from cyxjax.data.catalog import load_dataset, names
from cyxjax.data.sources import Subset
from cyxjax.data.splits import DatasetInfo, stratified_rows
from cyxjax.data.text import decode, encode
from cyxjax.errors import ConfigError, DataError

FIRST_TEST_LABELS = [1, 5, 6, 3, 5, 7, 9, 2, 9, 0, 5, 9]


def take_all(dataset):
    return dataset.take(np.arange(len(dataset)))


def test_digits():
    splits = load_dataset("digits")
    inputs, targets = take_all(splits.train)
    assert (inputs.dtype, inputs.shape[1:], targets.dtype) == (np.float32, (8, 8, 1), np.int32)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert splits.info.input_shape == (8, 8, 1)
    assert (splits.info.num_classes, splits.info.task) == (10, "classification")
    assert [len(part) for part in splits[:3]] == [1258, 180, 359]  # 1,797 in all: 70, 10 and 20 in 100
    # every class is divided alike: 174 to 183 scans of each, so 34 to 37 in the test set
    assert np.bincount(take_all(splits.test)[1]).min() >= 34


def test_digits_are_split_the_same_every_time_and_without_overlap():
    one, other = load_dataset("digits"), load_dataset("digits")
    for a, b in zip(one[:3], other[:3], strict=True):
        assert np.array_equal(take_all(a)[0], take_all(b)[0])
    assert one.test.targets[:12].tolist() == FIRST_TEST_LABELS  # on every machine
    assert not np.array_equal(one.val.targets, load_dataset("digits", split_seed=1).val.targets)
    rows = np.concatenate(stratified_rows(np.arange(100) % 3, (0.7, 0.1, 0.2), 0))
    assert np.array_equal(np.sort(rows), np.arange(100))


@pytest.mark.parametrize(
    ("name", "shape", "task", "classes"),
    [
        ("wine", (13,), "classification", 3),
        ("breast_cancer", (30,), "classification", 2),
        ("diabetes", (10,), "regression", 1),
    ],
)
def test_tables_are_standardised_by_their_training_rows(name, shape, task, classes):
    splits = load_dataset(name)
    inputs, targets = take_all(splits.train)
    assert (splits.info.input_shape, splits.info.task, splits.info.num_classes) == (shape, task, classes)
    assert np.allclose(inputs.mean(0), 0, atol=1e-5)  # float32 means of a few hundred rows
    assert np.allclose(inputs.std(0), 1, atol=1e-5)
    assert inputs.dtype == np.float32
    assert targets.dtype == (np.float32 if task == "regression" else np.int32)
    assert targets.shape[1:] == ((1,) if task == "regression" else ())


def test_text_predicts_the_next_character():
    splits = load_dataset("text", sequence_length=32)
    inputs, targets = take_all(splits.train)
    assert inputs.shape == targets.shape == (len(splits.train), 32)
    assert inputs.dtype == np.int32
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert np.array_equal(inputs[1:, 0], targets[:-1, -1])
    vocabulary = splits.info.vocabulary
    assert len(vocabulary) == splits.info.num_classes > inputs.max()
    assert "assert" in decode(inputs, vocabulary)  # the first help topic is the assert statement
    with pytest.raises(DataError, match="'€' .*1 .*2"):
        encode("a€", "ab")
    with pytest.raises(ConfigError, match="sequence_length=0"):
        load_dataset("text", sequence_length=0)


def test_a_text_of_ones_own(tmp_path):
    (tmp_path / "poem.txt").write_text("abcab" * 40, encoding="utf-8")
    splits = load_dataset("text", tmp_path / "poem.txt", sequence_length=4)
    assert (splits.info.vocabulary, len(splits.train)) == ("abc", (160 - 1) // 4)
    with pytest.raises(ConfigError, match="sequence_length=64 .*20"):
        load_dataset("text", tmp_path / "poem.txt")


def test_unknown_names_and_options_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="'digit'.* 'digits'"):
        load_dataset("digit")
    with pytest.raises(ConfigError, match="'digits' .*'val_fractoin'.* 'val_fraction'"):
        load_dataset("digits", val_fractoin=0.1)
    with pytest.raises(ConfigError, match="'mnist' .*root"):
        load_dataset("mnist")
    with pytest.raises(ConfigError, match="'wine' .*'root'"):
        load_dataset("wine", ".")
    with pytest.raises(ConfigError, match=r"root=nowhere\.csv"):
        load_dataset("csv", "nowhere.csv")
    with pytest.raises(ConfigError, match=r"\(0\.0, 0\.5, 0\.5\)"):
        load_dataset("wine", val_fraction=0.5, test_fraction=0.5)
    assert "digits" in names()


def test_digits_are_those_of_the_library_which_is_not_loaded(monkeypatch):
    from_file = take_all(load_dataset("digits").train)
    monkeypatch.setattr(catalog, "find_spec", lambda name: None)
    for found, wanted in zip(from_file, take_all(load_dataset("digits").train), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(catalog, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"sklearn .*'cyxjax\[digits\]'"):
        load_dataset("digits")


def write_idx(path, array, code, zipped):
    header = struct.pack(">HBB", 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.fixture
def mnist_folder(tmp_path):
    random = np.random.default_rng(0)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, size in (("train", 50), ("t10k", 20)):
        images = random.integers(0, 256, (size, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(size)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images, 0x08, zipped=True)
        write_idx(
            folder / f"{part}-labels-idx1-ubyte", (np.arange(size) % 10).astype(np.uint8), 0x08, zipped=False
        )
    return tmp_path


def test_mnist(mnist_folder):
    splits = load_dataset("mnist", mnist_folder, val_fraction=0.2)
    assert [len(part) for part in splits[:3]] == [40, 10, 20]
    assert splits.info.input_shape == (28, 28, 1)
    for part in splits[:3]:
        inputs, targets = take_all(part)
        # the corner pixel holds the row number, whose last digit is the label
        assert np.array_equal(np.rint(inputs[:, 0, 0, 0] * 255) % 10, targets)
    assert splits.info.num_classes == 10


def test_mnist_and_fashion_mnist_side_by_side_are_told_apart(mnist_folder):
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load_dataset("fashion_mnist", mnist_folder)
    (mnist_folder / "MNIST").rename(mnist_folder / "FashionMNIST")
    assert load_dataset("fashion_mnist", mnist_folder).info.name == "fashion_mnist"
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load_dataset("mnist", mnist_folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00\x08", ".*000008"),
        (b"PK\x03\x04" + bytes(50), ".*504b0304"),
        (b"\x00\x00\x07\x03" + bytes(50), ".*0x07"),
        (b"\x00\x00\x08\x01" + bytes(50), ".*1 dimensions.*3"),
        (
            struct.pack(">HBB3I", 0, 8, 3, 5, 28, 28) + bytes(100),
            r".*100 .*\(5,28,28\)",
        ),
        (struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3), ".*ValueError"),
        (b"\x1f\x8b" + bytes(20), ".*compression"),
    ],
)
def test_a_damaged_idx_file_is_named_with_its_field(mnist_folder, content, message):
    path = mnist_folder / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.gz: {message}"):
        load_dataset("mnist", mnist_folder)


def test_missing_and_mismatched_mnist_files_are_named(mnist_folder):
    folder = mnist_folder / "MNIST" / "raw"
    write_idx(folder / "t10k-labels-idx1-ubyte", np.zeros(19, np.uint8), 0x08, zipped=False)
    with pytest.raises(DataError, match="20.* 19"):
        load_dataset("mnist", mnist_folder)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        load_dataset("mnist", mnist_folder)


def write_cifar(folder, num_records=20):
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        records = np.zeros((num_records, 3073), np.uint8)
        records[:, 0] = np.arange(num_records) % 10
        records[:, 1:1025], records[:, 1025:2049], records[:, 2049:] = 255, 51, records[:, :1]
        records.tofile(folder / name)


def test_cifar10(tmp_path):
    write_cifar(tmp_path)
    splits = load_dataset("cifar10", tmp_path)
    inputs, targets = take_all(splits.train)
    assert [len(part) for part in splits[:3]] == [90, 10, 20]
    assert inputs.shape == (90, 32, 32, 3)
    # planes in the file, channels last here: red 1, green 0.2, blue the label / 255
    assert np.allclose(inputs[0, 5, 7], [1, 0.2, targets[0] / 255])
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3000))
    with pytest.raises(DataError, match=r"data_batch_3\.bin: .*3000 .*3073"):
        load_dataset("cifar10", tmp_path)


X = np.arange(120, dtype=np.float32).reshape(30, 4)
Y = (np.arange(30) % 3).astype(np.int64)


def test_npz(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, X=X, y=Y)
    splits = load_dataset("npz", path)
    assert (splits.info.num_classes, splits.info.input_shape, sum(len(p) for p in splits[:3])) == (
        3,
        (4,),
        30,
    )
    np.savez(path, x_train=X, y_train=Y + 0.5, x_val=X, y_val=Y + 0.5, x_test=X[:7], y_test=Y[:7] + 0.5)
    splits = load_dataset("npz", path)
    assert (splits.info.task, splits.info.num_classes, len(splits.test)) == ("regression", 1, 7)
    assert take_all(splits.test)[1].shape == (7, 1)
    np.savez(path, x_train=X)
    with pytest.raises(DataError, match=r"data\.npz holds x_train.* y_train"):
        load_dataset("npz", path)


def test_pickled_and_broken_archives_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.array([print], dtype=object), y=Y)
    with pytest.raises(DataError, match=r"data\.npz: .*allow_pickle"):
        load_dataset("npz", path)
    np.savez(path, x=X, y=Y - 1)
    with pytest.raises(DataError, match=r"data\.npz: labels -1 to 1"):
        load_dataset("npz", path)
    np.savez(path, x=X, y=Y)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"data\.npz: .*BadZipFile"):
        load_dataset("npz", path)


def test_npy_stays_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    splits = load_dataset("npy", tmp_path)
    assert isinstance(splits.train, Subset)
    assert isinstance(splits.train.dataset.inputs, np.memmap)
    seen = np.concatenate([take_all(part)[0][:, 0] for part in splits[:3]])
    assert np.array_equal(np.sort(seen), X[:, 0])
    for part in splits[:3]:
        inputs, targets = take_all(part)
        assert np.array_equal(inputs[:, 0] // 4 % 3, targets)


def test_csv(tmp_path):
    path = tmp_path / "iris.csv"
    path.write_text("a,kind,b\n" + "".join(f"{i},{'xyz'[i % 3]},{i / 2}\n" for i in range(30)))
    splits = load_dataset("csv", path, target="kind")
    assert (splits.info.num_classes, splits.info.class_names) == (3, ("x", "y", "z"))
    assert DatasetInfo.from_json(splits.info.to_json()).column_names == ("a", "b")
    inputs, targets = take_all(splits.train)
    assert np.array_equal(inputs[:, 0] % 3, targets)
    assert np.array_equal(inputs[:, 1] * 2, inputs[:, 0])
    path.write_text("a,price\n" + "".join(f"{i},{10 * i}\n" for i in range(30)))
    with pytest.raises(DataError, match="30 samples .*30 classes .*3 splits.*regression"):
        load_dataset("csv", path)
    priced = load_dataset("csv", path, task="regression")
    assert np.array_equal(take_all(priced.val)[1][:, 0], take_all(priced.val)[0][:, 0] * 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n1,x\n", "2 samples .*2 classes .*3 splits"),
        ("a,b\n1,2\nx,3\n", r"t\.csv: .*'x'"),
        ("a,b\n1,2\n,3\n", r"t\.csv: .*''"),
        ("a,b\n1,2\n3\n", r"t\.csv: "),
        ("a,b\n", r"t\.csv: .*'b'"),
        ("", r"t\.csv: .*'b'"),
        ("a,c\n1,2\n", r"t\.csv: .*'b'.* c"),
    ],
)
def test_a_bad_csv_is_named_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_dataset("csv", path, target="b")


def test_image_folder(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for i in range(10):
            image.new("RGB", (20, 10), (255 * label, 51, 0)).save(tmp_path / name / f"{i}.png")
    splits = load_dataset("image_folder", tmp_path, image_size=8)
    inputs, targets = take_all(splits.train)
    assert inputs.shape == (14, 8, 8, 3)
    assert np.allclose(inputs[:, 0, 0], np.stack([targets, targets * 0 + 0.2, targets * 0], axis=1))
    assert splits.info.class_names == ("cat", "dog")
    grey = load_dataset("image_folder", tmp_path, image_size=8, grey=True, num_workers=0)
    assert take_all(grey.val)[0].shape == (2, 8, 8, 1)
    (tmp_path / "cat" / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cat/0\.png"):
        [take_all(part) for part in load_dataset("image_folder", tmp_path)[:3]]


def test_without_pillow_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match="PIL.* pillow"):
        load_dataset("image_folder", tmp_path)
