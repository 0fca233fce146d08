"""Datasets by name: real data, fixed splits, errors that name file and field; packed texts."""

import gzip
import io
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyxjax.data import catalog
from cyxjax.data.catalog import as_splits, load_dataset
from cyxjax.data.formats import read_table
from cyxjax.data.sources import Subset, as_dataset
from cyxjax.data.splits import DatasetInfo, Splits, split_rows, stratified_rows
from cyxjax.data.text import IGNORED, decode, pack
from cyxjax.errors import ConfigError, DataError

FIRST_TEST_LABELS = [1, 5, 6, 3, 5, 7, 9, 2, 9, 0, 5, 9]
X = np.arange(120, dtype=np.float32).reshape(30, 4)
Y = (np.arange(30) % 3).astype(np.int64)


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
    # every class is split equally: 174 to 183 scans of each, so 34 to 37 in the test set
    assert np.bincount(take_all(splits.test)[1]).min() >= 34
    assert splits.test.targets[:12].tolist() == FIRST_TEST_LABELS  # on every machine
    assert not np.array_equal(splits.val.targets, load_dataset("digits", split_seed=1).val.targets)


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


def test_text_predicts_the_next_character(tmp_path):
    splits = load_dataset("text", sequence_length=32)
    inputs, targets = take_all(splits.train)
    assert inputs.shape == targets.shape == (len(splits.train), 32)
    assert inputs.dtype == np.int32
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    assert np.array_equal(inputs[1:, 0], targets[:-1, -1])
    vocabulary = splits.info.vocabulary
    assert len(vocabulary) == splits.info.num_classes > inputs.max()
    assert "assert" in decode(inputs, vocabulary)  # the first help topic is the assert statement
    (tmp_path / "poem.txt").write_text("abcab" * 40, encoding="utf-8-sig")  # its first mark is no character
    splits = load_dataset("text", tmp_path / "poem.txt", sequence_length=4)
    assert (splits.info.vocabulary, len(splits.train)) == ("abc", (160 - 1) // 4)


@pytest.mark.parametrize(
    ("name", "root", "options", "message"),
    [
        ("digit", None, {}, "'digit'.* 'digits'"),
        ("digits", None, {"val_fractoin": 0.1}, "'digits' .*'val_fractoin'.* 'val_fraction'"),
        ("mnist", None, {}, "'mnist' .*root"),
        ("wine", ".", {}, "'wine' .*'root'"),
        ("csv", "nowhere.csv", {}, r"root=nowhere\.csv"),
        ("wine", None, {"val_fraction": 0.5, "test_fraction": 0.5}, r"\(0\.0, 0\.5, 0\.5\)"),
    ],
)
def test_unknown_names_and_options_are_answered_with_the_nearest(name, root, options, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(name, root, **options)


def test_digits_are_those_of_the_library_which_is_not_loaded(monkeypatch):
    monkeypatch.setattr(catalog, "_digits", catalog._digits.__wrapped__)  # reads each time
    from_file = take_all(load_dataset("digits").train)
    monkeypatch.setattr(catalog, "find_spec", lambda name: None)
    for found, wanted in zip(from_file, take_all(load_dataset("digits").train), strict=True):
        np.testing.assert_array_equal(found, wanted)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"sklearn .*'cyxjax\[digits\]'"):
        load_dataset("digits")


# ---- files ------------------------------------------------------------------------------------------------


def idx(array):
    array = array.astype(np.uint8)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def images_of(size):
    """Images whose corner pixel is the row number; its last digit is the label."""
    images = np.random.default_rng(0).integers(0, 256, (size, 28, 28))
    images[:, 0, 0] = np.arange(size)
    return idx(images)


MNIST = {
    "train-images-idx3-ubyte.gz": gzip.compress(images_of(50)),
    "train-labels-idx1-ubyte": idx(np.arange(50) % 10),
    "t10k-images-idx3-ubyte": images_of(20),
    "t10k-labels-idx1-ubyte": idx(np.arange(20) % 10),
}


@pytest.mark.parametrize(("name", "inside"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist(tmp_path, name, inside):
    write(tmp_path / inside / "raw", MNIST)
    splits = load_dataset(name, tmp_path, val_fraction=0.2)
    assert [len(part) for part in splits[:3]] == [40, 10, 20]
    assert (splits.info.name, splits.info.input_shape, splits.info.num_classes) == (name, (28, 28, 1), 10)
    for part in splits[:3]:
        inputs, targets = take_all(part)
        assert np.array_equal(np.rint(inputs[:, 0, 0, 0] * 255) % 10, targets)


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def cifar(labels):
    records = np.zeros((len(labels), 3073), np.uint8)
    records[:, 0] = labels
    records[:, 1:1025], records[:, 1025:2049], records[:, 2049:] = 255, 51, records[:, :1]
    return records.tobytes()


CIFAR = {f"data_batch_{n}.bin": cifar(np.arange(20) % 10) for n in range(1, 6)}


def test_cifar10(tmp_path):
    write(tmp_path, CIFAR | {"test_batch.bin": cifar(np.arange(20) % 10)})
    splits = load_dataset("cifar10", tmp_path)
    inputs, targets = take_all(splits.train)
    assert [len(part) for part in splits[:3]] == [90, 10, 20]
    assert inputs.shape == (90, 32, 32, 3)
    # planes in the file, channels last here: red 1, green 0.2, blue the label / 255
    assert np.allclose(inputs[0, 5, 7], [1, 0.2, targets[0] / 255])


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_npz(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(npz(X=X, y=Y))
    splits = load_dataset("npz", path)
    assert (splits.info.num_classes, splits.info.input_shape) == (3, (4,))
    assert sum(len(part) for part in splits[:3]) == 30
    y = Y + 0.5
    x = X.astype(">f4")  # the other byte order: jax refuses it
    path.write_bytes(npz(x_train=x, y_train=y, x_val=x, y_val=y, x_test=x[:7], y_test=y[:7]))
    splits = load_dataset("npz", path)
    assert (splits.info.task, splits.info.num_classes, len(splits.test)) == ("regression", 1, 7)
    inputs, targets = take_all(splits.test)
    assert (inputs.dtype, inputs.tolist(), targets.shape) == (np.float32, X[:7].tolist(), (7, 1))


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
    path.write_text("a,b,a\n" + "".join(f"{i},{i / 2},{'xyz'[i % 3]}\n" for i in range(30)))
    assert load_dataset("csv", path).info.class_names == ("x", "y", "z")
    path.write_text("a,price\n" + "".join(f"{i},{10**10 * i}\n" for i in range(30)))  # no labels
    assert read_table(path).shape == (30, 2)
    (tmp_path / "head.csv").write_text("a,price\n")
    with pytest.raises(DataError, match=r"head\.csv: "):
        read_table(tmp_path / "head.csv")
    priced = load_dataset("csv", path, task="regression")
    assert np.array_equal(take_all(priced.val)[1][:, 0], take_all(priced.val)[0][:, 0] * np.float32(10**10))


IMAGES = "train-images-idx3-ubyte"
PRICES = b"a,b\n" + b"".join(b"%d,%d\n" % (i, 10 * i) for i in range(30))
KINDS = b"a,b\n" + b"1,cat\n2,dog\n" * 20
NO_DATA = [  # name, existing files, of which the first is the subject; options; what the error names
    ("mnist", {IMAGES: b"\x00\x00\x08"}, {}, f"{IMAGES}: .*000008"),
    ("mnist", {IMAGES: b"PK\x03\x04" + bytes(50)}, {}, f"{IMAGES}: .*504b0304"),
    ("mnist", {IMAGES: b"\x00\x00\x07\x03" + bytes(50)}, {}, f"{IMAGES}: .*0x07"),
    ("mnist", {IMAGES: idx(np.zeros(50))}, {}, f"{IMAGES}: .*1 dimensions.*3"),
    ("mnist", {IMAGES: images_of(5)[:116]}, {}, rf"{IMAGES}: .*100 .*\(5,28,28\)"),
    ("mnist", {IMAGES: struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3)}, {}, f"{IMAGES}: .*ValueError"),
    ("mnist", {f"{IMAGES}.gz": b"\x1f\x8b" + bytes(20)}, {}, rf"{IMAGES}\.gz: .*compression"),
    ("mnist", {"given": b"a file, no folder"}, {}, "given: .*train-images"),
    ("mnist", {IMAGES: images_of(5)}, {}, "train-labels-idx1-ubyte"),
    ("mnist", MNIST | {"t10k-labels-idx1-ubyte": idx(np.zeros(19))}, {}, "20.* 19"),
    ("cifar10", CIFAR | {"data_batch_3.bin": bytes(3000)}, {}, r"data_batch_3\.bin: .*3000 .*3073"),
    ("npz", {"t.npz": npz(x_train=X)}, {}, r"t\.npz holds x_train.* y_train"),
    ("npz", {"t.npz": npz(x=np.array([print], object), y=Y)}, {}, r"t\.npz: .*allow_pickle"),
    ("npz", {"t.npz": npz(x=X[:0], y=Y[:0] > 0)}, {}, "0 samples"),
    ("npz", {"t.npz": npz(x=X[:0], y=np.zeros(0))}, {}, "0 samples"),
    ("npz", {"t.npz": npz(x=X, y=Y - 1)}, {}, r"t\.npz: .*labels -1 to 1"),
    ("npz", {"t.npz": npz(x=X, y=Y + 2**32)}, {}, rf"t\.npz: .*labels {2**32} to"),
    ("npz", {"t.npz": npz(x=X, y=Y)[:-40]}, {}, r"t\.npz: .*BadZipFile"),
    ("npy", {"y.npy": b"no array", "x.npy": b"no array"}, {}, r"y\.npy: .*np\.save"),
    ("csv", {"t.csv": b"a,b\n1,2\n1,x\n"}, {}, "2 samples .*2 classes .*3 splits"),
    ("csv", {"t.csv": b"a,b\n1,2\nx,3\n"}, {}, r"t\.csv, row 3: .*'x'"),
    ("csv", {"t.csv": b"a,b\n1,2\n,3\n"}, {}, r"t\.csv, row 3: .*'a'"),
    ("csv", {"t.csv": b"a,b\n1,2\n3,\n"}, {}, r"t\.csv, row 3: .*'b'"),
    ("csv", {"t.csv": KINDS + b"3, \n"}, {}, r"t\.csv, row 42: .*'b'"),
    ("csv", {"t.csv": b"a,b\n1,2\n3\n"}, {}, r"t\.csv, row 3: 1 .*2"),
    ("csv", {"t.csv": b"a,c,b\n1,0.1,0.2,0\n"}, {}, r"t\.csv, row 2: 4 .*3"),  # as R writes names of rows
    ("csv", {"t.csv": b"a,b\n"}, {}, r"t\.csv: no samples"),
    ("csv", {"t.csv": b""}, {}, r"t\.csv: .*''"),
    ("csv", {"t.csv": b"a\n1\n2\n"}, {}, r"t\.csv: 1 column.*'a'"),
    ("csv", {"t.csv": b"a,c\n1,2\n"}, {"target": "b"}, r"t\.csv: .*'b'.* c"),
    ("csv", {"t.csv": PRICES}, {}, "30 samples .*30 classes .*3 splits.*regression"),
    ("csv", {"t.csv": b"a,y\n1,0\n2,1\n3,nan\n"}, {"task": "classification"}, "'nan'"),
    ("csv", {"t.csv": KINDS}, {"task": "regression"}, r"t\.csv: .* 'cat'"),
    ("csv", {"t.csv": b"a,b\n\xff,1\n"}, {}, r"t\.csv: .*position 4.*UTF-8"),
    ("text", {"t.txt": b"\xff\xfe" * 50}, {}, r"t\.txt: .*position 0.*UTF-8"),
    ("text", {"t.txt": b"to be or not " * 50}, {"val_fraction": 0.0}, "part of 0 characters"),
    ("text", {"t.txt": b"abcab" * 40}, {"sequence_length": 0}, "sequence_length=0 "),
    ("text", {"t.txt": b"abcab" * 40}, {"sequence_length": 64}, "sequence_length=64 "),
]


@pytest.mark.parametrize(("name", "files", "options", "message"), NO_DATA, ids=range(len(NO_DATA)))
def test_a_file_that_is_no_data_is_named(tmp_path, name, files, options, message):
    write(tmp_path, files)
    first = next(iter(files))
    root = tmp_path / first if first.partition(".")[0] in ("t", "given") else tmp_path
    with pytest.raises((ConfigError, DataError), match=message) as error:
        load_dataset(name, root, **options)
    assert str(error.value).count("HINT") == 1


def write_image(path, **new):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(**{"mode": "RGB", "size": (4, 4)} | new).save(path)


def test_image_folder(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        for i in range(10):
            write_image(tmp_path / name / f"{i}.png", size=(20, 10), color=(255 * label, 51, 0))
    for hidden in (".ipynb_checkpoints/0", "cat/.ipynb_checkpoints/0", "cat/._0"):  # of Jupyter and macOS
        write_image(tmp_path / f"{hidden}.png")
    splits = load_dataset("image_folder", tmp_path, image_size=8)
    inputs, targets = take_all(splits.train)
    assert (inputs.shape, np.bincount(targets).tolist()) == ((14, 8, 8, 3), [7, 7])
    assert np.allclose(inputs[:, 0, 0], np.stack([targets, targets * 0 + 0.2, targets * 0], axis=1))
    assert splits.info.class_names == ("cat", "dog")
    grey = load_dataset("image_folder", tmp_path, image_size=8, grey=True, num_workers=0)
    assert take_all(grey.val)[0].shape == (2, 8, 8, 1)
    with pytest.raises(DataError, match=f"^{tmp_path / 'cat'}: "):
        load_dataset("image_folder", tmp_path / "cat")
    (tmp_path / "ant").mkdir()  # a class that this folder has no images of: it keeps its number
    assert np.bincount(take_all(load_dataset("image_folder", tmp_path).train)[1]).tolist() == [0, 7, 7]
    (tmp_path / "ant").rmdir()
    (tmp_path / "cat" / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cat/0\.png"):
        [take_all(part) for part in load_dataset("image_folder", tmp_path)[:3]]
    write_image(tmp_path / "cat" / "0.png")
    write_image(tmp_path / "dog" / "deep.tif", mode="I;16", color=300)  # Pillow would clip it at 255
    with pytest.raises(DataError, match=r"dog/deep\.tif: .*I;16"):
        [take_all(part) for part in load_dataset("image_folder", tmp_path)[:3]]


def test_images_that_are_split_already_keep_their_parts(tmp_path):
    for path in ("train/cat/0", "train/cat/1", "train/dog/0", "val/cat/0", "val/dog/0", "test/dog/0"):
        write_image(tmp_path / f"{path}.png")
    splits = load_dataset("image_folder", tmp_path, image_size=4)
    assert [take_all(part)[1].tolist() for part in splits[:3]] == [[0, 0, 1], [0, 1], [1]]
    write_image(tmp_path / "val" / "cow" / "0.png")
    with pytest.raises(DataError, match="val: .*'cow'"):
        load_dataset("image_folder", tmp_path, image_size=4)


@pytest.mark.parametrize(
    ("stored", "lengths"), [("val", [16, 2, 4]), ("valid", [16, 2, 4]), ("test", [18, 2, 2])]
)
def test_of_images_in_train_only_the_missing_part_is_drawn(tmp_path, stored, lengths):
    # Ten of each class: a tenth for validation, a fifth for the test.
    for name in ("cat", "dog"):
        for path in (*(f"train/{name}/{i}" for i in range(10)), f"{stored}/{name}/0"):
            write_image(tmp_path / f"{path}.png")
    splits = load_dataset("image_folder", tmp_path, image_size=4)
    assert [len(part) for part in splits[:3]] == lengths
    assert splits.info.class_names == ("cat", "dog")


# ---- splits, and texts in rows ----------------------------------------------------------------------------


def test_every_class_is_divided_in_the_fractions():
    # 70 of class 0, 20 of class 1, 10 of class 2, mixed: a tenth and a fifth of each, to the sample.
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [70, 20, 10]))
    parts = stratified_rows(labels, (0.7, 0.1, 0.2), seed=3)
    counts = [np.bincount(labels[rows], minlength=3).tolist() for rows in parts]
    assert counts == [[49, 14, 7], [7, 2, 1], [14, 4, 2]]
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert all((np.diff(rows) > 0).all() for rows in parts)
    # Several labels of a sample are no class of it.
    assert list(map(len, split_rows(np.zeros((50, 6), int), "classification"))) == [35, 5, 10]
    # As classes, each of these targets would be a class with one sample.
    assert list(map(len, split_rows(np.linspace(0, 1, 50), "regression"))) == [35, 5, 10]


def test_what_a_loader_of_one_s_own_gives_is_asked_for_what_a_model_needs():
    with pytest.raises(DataError, match=r"'mine' .*dict.*cx\.data\.Splits"):
        as_splits("mine", {})
    with pytest.raises(ConfigError, match=r"'mine' .*cx\.data\.DatasetInfo"):
        as_splits("mine", (list(zip(X, Y, strict=True)),) * 3)
    info = DatasetInfo("mine", "classification", 2, X.shape[1:])
    found = as_splits("mine", Splits(*(list(zip(X, Y, strict=True)),) * 3, info))  # objects with items
    np.testing.assert_array_equal(found.test.take(np.arange(3))[0], X[:3])
    found = as_splits("mine", ((X, {"a": Y, "b": X}),) * 3)  # targets of a task with several losses
    assert found.info == DatasetInfo("mine", "regression", 1, X.shape[1:])


@pytest.mark.parametrize(
    "given",
    [
        {"class_names": np.arange(3), "column_names": None},
        {"task": "segmentation", "vocabulary": None, "class_names": None},
        {"num_classes": np.int64(3), "input_shape": np.array([4]), "column_names": range(4)},
    ],
)
def test_the_facts_of_a_program_s_own_data_are_read_as_they_were_given(given):
    info = DatasetInfo(**{"name": "mine", "task": "language", "num_classes": 3, "input_shape": (4,)} | given)
    assert DatasetInfo.from_json(info.to_json()) == info


def test_texts_share_rows():
    packed = pack([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12]], 4)
    assert packed.tokens.tolist() == [[1, 2, 5, 11], [7, 8, 9, 10]]
    assert packed.targets.tolist() == [[2, 3, 6, 12], [8, 9, 10, 11]]
    assert packed.segments.tolist() == [[1, 1, 2, 3], [1, 1, 1, 1]]
    assert packed.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert packed.filled == 1.0
    inputs, targets = as_dataset(packed).take(np.array([1]))
    assert [one.tolist() for one in inputs] == [[[7, 8, 9, 10]], [[1, 1, 1, 1]], [[0, 1, 2, 3]]]
    assert targets.tolist() == [[8, 9, 10, 11]]


@given(st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=90), st.integers(1, 7))
def test_every_pair_stands_once(texts, length):
    pairs = sorted((a, b) for text in texts for a, b in zip(text, text[1:], strict=False))
    if not pairs:
        assert pack(texts, length).tokens.shape == (0, length)
        return
    packed = pack(texts, length)
    real = packed.targets != IGNORED
    assert sorted(zip(packed.tokens[real].tolist(), packed.targets[real].tolist(), strict=True)) == pairs
    assert ((packed.segments > 0) == real).all()
    assert (packed.tokens[~real] == 0).all()
    starts = (packed.positions == 0) & real
    same = np.diff(packed.segments, axis=1, prepend=0) == 0
    assert (starts == (real & ~same)).all()  # positions count within a text and restart with each


@pytest.mark.parametrize("text", [[1.5, 2.0], "ab"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError):
        pack([[1, 2], text], 4)
