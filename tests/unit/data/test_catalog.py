"""Data sets by name: real data, splits that never change, errors that name file and field; packed texts."""

import gzip
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyxjax.data import catalog
from cyxjax.data.catalog import as_splits, load_dataset
from cyxjax.data.formats import read_table
from cyxjax.data.sources import Subset
from cyxjax.data.splits import DatasetInfo, split_rows, stratified_rows
from cyxjax.data.text import IGNORED, decode, encode, pack
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
    with pytest.raises(DataError, match="'€' .*1 .*2"):
        encode("a€", "ab")
    (tmp_path / "poem.txt").write_text("abcab" * 40, encoding="utf-8")
    splits = load_dataset("text", tmp_path / "poem.txt", sequence_length=4)
    assert (splits.info.vocabulary, len(splits.train)) == ("abc", (160 - 1) // 4)
    for length in (0, 64):
        with pytest.raises(ConfigError, match=f"sequence_length={length} "):
            load_dataset("text", tmp_path / "poem.txt", sequence_length=length)


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
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load_dataset("fashion_mnist", mnist_folder)
    (mnist_folder / "MNIST").rename(mnist_folder / "FashionMNIST")
    assert load_dataset("fashion_mnist", mnist_folder).info.name == "fashion_mnist"


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


@pytest.mark.parametrize(
    ("x", "y", "kept", "message"),
    [
        (np.array([print], dtype=object), Y, None, "allow_pickle"),
        (X, Y - 1, None, "labels -1 to 1"),
        (X, Y + 2**32, None, f"labels {2**32} to"),
        (X, Y, -40, "BadZipFile"),
    ],
    ids=["pickled", "negative", "wide", "broken"],
)
def test_archives_that_hold_no_data_are_refused(tmp_path, x, y, kept, message):
    path = tmp_path / "data.npz"
    np.savez(path, x=x, y=y)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=rf"data\.npz: .*{message}"):
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
    path.write_text("a,price\n" + "".join(f"{i},{10**10 * i}\n" for i in range(30)))  # no labels
    assert read_table(path).shape == (30, 2)
    priced = load_dataset("csv", path, task="regression")
    assert np.array_equal(take_all(priced.val)[1][:, 0], take_all(priced.val)[0][:, 0] * np.float32(10**10))
    path.write_text("a,y\n1,0\n2,1\n3,nan\n")
    with pytest.raises(DataError, match="'nan'"):
        load_dataset("csv", path, task="classification")


@pytest.mark.parametrize(("content", "samples"), [("0\n1\n2\n", 3), ("1\n5\n", 2), ("0,1\n3,4\n", 1)])
def test_one_column_without_a_header_keeps_its_first_sample(tmp_path, content, samples):
    (tmp_path / "x.csv").write_text(content)
    assert len(read_table(tmp_path / "x.csv")) == samples


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n1,x\n", "2 samples .*2 classes .*3 splits"),
        ("a,b\n1,2\nx,3\n", r"t\.csv: .*'x'"),
        ("a,b\n1,2\n,3\n", r"t\.csv: .*''"),
        ("a,b\n1,2\n3\n", r"t\.csv, row 3: 1 .*2"),
        ("a,c,b\n1,0.1,0.2,0\n", r"t\.csv, row 2: 4 .*3"),  # as R writes names of rows
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
    with pytest.raises(DataError, match=f"^{tmp_path / 'cat'}: "):
        load_dataset("image_folder", tmp_path / "cat")
    (tmp_path / "cat" / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cat/0\.png"):
        [take_all(part) for part in load_dataset("image_folder", tmp_path)[:3]]


def test_every_class_is_divided_in_the_fractions():
    # 70 of class 0, 20 of class 1, 10 of class 2, mixed: a tenth and a fifth of each, to the sample.
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [70, 20, 10]))
    parts = stratified_rows(labels, (0.7, 0.1, 0.2), seed=3)
    counts = [np.bincount(labels[rows], minlength=3).tolist() for rows in parts]
    assert counts == [[49, 14, 7], [7, 2, 1], [14, 4, 2]]
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert all((np.diff(rows) > 0).all() for rows in parts)
    # As classes, each of these targets would be a class of one sample.
    assert list(map(len, split_rows(np.linspace(0, 1, 50), "regression"))) == [35, 5, 10]


def test_the_seed_makes_the_split_and_too_few_samples_are_refused():
    labels = np.arange(60) % 3
    first, again, other = (stratified_rows(labels, (0.5, 0.5), seed=s) for s in (1, 1, 2))
    assert np.array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])
    with pytest.raises(ConfigError, match=r"\(0\.5, 0\.6\)"):
        stratified_rows(np.arange(9) % 3, (0.5, 0.6), 0)
    with pytest.raises(DataError, match="3 samples .*3 classes .*2 splits"):
        stratified_rows(np.arange(3), (0.9, 0.1), 0)


WORDS = b"a,b\n" + b"1,cat\n2,dog\n" * 20
FILES = [
    ("csv", WORDS, {"task": "regression"}, "given: .* 'cat'"),
    ("csv", b"a,b\n\xff,1\n", {}, "given: .*position 4.*UTF-8"),
    ("text", b"\xff\xfe" * 50, {}, "given: .*position 0.*UTF-8"),
    ("text", b"to be or not " * 50, {"val_fraction": 0.0}, "stretch of 0 characters"),
    ("npy", b"no array", {}, r"y\.npy: .*np\.save"),
    ("mnist", b"a file, no folder", {}, "given: .*train-images"),
]


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    FILES,
    ids=range(len(FILES)),
)
def test_a_file_that_is_no_data_is_named(tmp_path, name, content, options, said):
    for file in ("x.npy", "y.npy", "given"):
        (tmp_path / file).write_bytes(content)
    with pytest.raises((ConfigError, DataError), match=said) as told:
        load_dataset(name, tmp_path if name == "npy" else tmp_path / "given", **options)
    assert str(told.value).count("HINT") == 1


def write_image(path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", (4, 4)).save(path)


def test_images_that_are_split_already_keep_their_parts(tmp_path):
    for part, count in {"train": 3, "val": 2, "test": 1}.items():
        for number in range(count):
            for name in ("cat", "dog"):
                write_image(tmp_path / part / name / f"{number}.png")
    splits = load_dataset("image_folder", tmp_path, image_size=4)
    assert [len(part) for part in splits[:3]] == [6, 4, 2]
    write_image(tmp_path / "val" / "cow" / "0.png")
    with pytest.raises(DataError, match="val: .*'cow'"):
        load_dataset("image_folder", tmp_path, image_size=4)


def test_what_a_loader_of_one_s_own_gives_is_asked_for_what_a_model_needs():
    with pytest.raises(DataError, match=r"'mine' .*dict.*cx\.data\.Splits"):
        as_splits("mine", {})

    class Items:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.float32([index]), np.int32(0)

    with pytest.raises(ConfigError, match=r"'mine' .*cx\.data\.DatasetInfo"):
        as_splits("mine", (Items(), Items(), Items()))


def test_texts_share_rows():
    packed = pack([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12]], 4)
    assert packed.tokens.tolist() == [[1, 2, 5, 11], [7, 8, 9, 10]]
    assert packed.targets.tolist() == [[2, 3, 6, 12], [8, 9, 10, 11]]
    assert packed.segments.tolist() == [[1, 1, 2, 3], [1, 1, 1, 1]]
    assert packed.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert packed.filled == 1.0


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
    assert (starts == (real & ~same)).all()  # places count on within a text, and begin anew with each


@pytest.mark.parametrize("text", [[1.5, 2.0], "ab"])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TypeError):
        pack([[1, 2], text], 4)
