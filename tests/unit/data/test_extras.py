"""Formats of other libraries by name; a test runs if its library (an extra) is installed."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import ConfigError, DataError

X = np.arange(40, dtype=np.float32).reshape(20, 2)
WORDS = ["dog", "cat"] * 10


def decode(record):
    return np.float32([record[0], 1]), np.int32(record[0] % 2)


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet", reason="pip install 'cyxjax[parquet]'")


def written(parquet, path, **columns):
    parquet.write_table(sys.modules["pyarrow"].table(columns), path)
    return path


def everything(splits):
    """(inputs, targets) of all parts together."""
    parts = [part.take(np.arange(len(part))) for part in splits[:3]]
    return [np.concatenate([part[i] for part in parts]) for i in (0, 1)]


def test_a_parquet_file_of_numbers_and_words(parquet, tmp_path):
    path = written(parquet, tmp_path / "a.parquet", a=X[:, 0], b=X[:, 1].astype(int), label=WORDS)
    splits = cx.data.load_dataset("parquet", path)
    assert (splits.info.class_names, splits.info.num_classes) == (("cat", "dog"), 2)
    assert splits.info.column_names == ("a", "b")
    assert (splits.info.task, splits.info.input_shape) == ("classification", (2,))
    assert cx.data.load_dataset("parquet", path, inputs=["b"]).info.column_names == ("b",)
    alone = cx.data.load_dataset("parquet", path, inputs=["a"])  # one column of numbers: rows of one
    assert (alone.info.column_names, alone.info.input_shape) == (("a",), (1,))
    assert alone.train.take(np.arange(2))[0].dtype == np.float32
    path = written(parquet, tmp_path / "b.parquet", label=X[:, 0], y=X[:, 1])  # `label` is an input here
    assert cx.data.load_dataset("parquet", path, inputs=["label"]).info.column_names == ("label",)
    inputs, targets = everything(splits)
    assert sorted(inputs.tolist()) == X.tolist()
    assert targets.tolist() == [int(x / 2 % 2 == 0) for x in inputs[:, 0]]  # dog is 1, and comes first


def test_a_folder_of_parts_lists_and_quantities(parquet, tmp_path):
    for number, rows in enumerate((slice(0, 10), slice(10, 20))):
        path = tmp_path / f"part-{number}.parquet"
        written(parquet, path, pixels=X[rows].tolist(), price=X[rows, 0] / 3, other=WORDS[rows])
    splits = cx.data.load_dataset("parquet", tmp_path, target="price", inputs=["pixels"])
    inputs, targets = everything(splits)
    assert (splits.info.task, splits.info.num_classes, inputs.shape, targets.shape) == (
        "regression",
        1,
        (20, 2),
        (20, 1),
    )
    np.testing.assert_allclose(targets[:, 0], inputs[:, 0] / 3, rtol=1e-6)


def test_classes_that_a_parquet_file_holds_as_floats(parquet, tmp_path):
    path = written(parquet, tmp_path / "a.parquet", a=X[:, 0], label=[0.0, 1.0] * 10)
    assert cx.data.load_dataset("parquet", path).info.task == "regression"
    splits = cx.data.load_dataset("parquet", path, task="classification")
    assert (splits.info.num_classes, everything(splits)[1].dtype) == (2, np.int32)


def test_nested_lists_of_a_parquet_file_keep_their_type(parquet, tmp_path):
    pixels = np.arange(20 * 6, dtype=np.uint8).reshape(20, 2, 3)
    column = sys.modules["pyarrow"].array(list(map(list, pixels)))
    path = written(parquet, tmp_path / "a.parquet", pixels=column, label=[0, 1] * 10)
    inputs, _ = everything(cx.data.load_dataset("parquet", path))
    assert inputs.dtype == np.uint8
    assert sorted(inputs.tolist()) == pixels.tolist()


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        ({"a": [[1], [1, 2]], "label": [0, 1]}, {}, DataError, r"'a' of .*x\.parquet"),
        *(
            ({"a": [0.5, None], "label": labels}, {}, DataError, r"x\.parquet.*'label'")
            for labels in ([0, None], ["a", None], [True, None])
        ),
        ({"a": [1, 2], "label": [0, 1]}, {"target": "labels"}, ConfigError, "'labels'.* 'label'"),
        ({"b": [1, 2], "label": [0, 1]}, {"inputs": ["lab"]}, ConfigError, "'lab'.* 'label'"),
        ({"label": [0, 1]}, {"inputs": ["label"]}, ConfigError, "'label'.* 'label'"),
    ],
)
def test_what_a_parquet_file_cannot_be_is_said(parquet, tmp_path, columns, options, error, message):
    path = written(parquet, tmp_path / "x.parquet", **columns)
    with pytest.raises(error, match=message):
        cx.data.load_dataset("parquet", path, **options)


def test_what_is_no_parquet_file_is_named(parquet, tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"x\.parquet: "):
        cx.data.load_dataset("parquet", tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("pyarrow.parquet", "parquet", "parquet"),
        ("datasets", "hf", "hf"),
        ("array_record.python.array_record_data_source", "array_record", "grain"),
    ],
)
def test_a_library_that_is_not_there_is_named_with_its_extra(module, name, extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"'cyxjax\[{extra}\]'"):
        cx.data.load_dataset(name, tmp_path)


def test_a_folder_of_hugging_faces(tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install 'cyxjax[hf]'")
    features = datasets.Features(
        {"x": datasets.List(datasets.Value("float32"), 2), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": [0, 1] * 10}, features=features)
    table.save_to_disk(str(tmp_path / "one"))
    splits = cx.data.load_dataset("hf", tmp_path / "one")
    assert (splits.info.class_names, splits.info.input_shape) == (("no", "yes"), (2,))
    assert sorted(everything(splits)[0].tolist()) == X.tolist()
    parts = datasets.DatasetDict(
        {"train": table, "validation": table.select([1]), "test": table.select([2, 3])}
    )
    parts.save_to_disk(str(tmp_path / "three"))
    assert [len(part) for part in cx.data.load_dataset("hf", tmp_path / "three")[:3]] == [20, 1, 2]


class Stored(list):
    """A part of a Hugging Face folder whose labels have no names."""

    features = {"x": None, "label": None}


def test_of_a_folder_of_hugging_face_only_the_missing_part_is_drawn(tmp_path, monkeypatch):
    rows = [{"x": x, "label": i % 2} for i, x in enumerate(X)]
    stored = {"train": Stored(rows), "test": Stored(rows[:3])}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: stored))
    with pytest.raises(ConfigError, match="options.num_classes"):
        cx.data.load_dataset("hf", tmp_path)
    monkeypatch.setattr(sys.modules["datasets"], "load_from_disk", lambda path: {"test": stored["test"]})
    with pytest.raises(DataError, match="'train'"):
        cx.data.load_dataset("hf", tmp_path)
    monkeypatch.setattr(sys.modules["datasets"], "load_from_disk", lambda path: stored)
    splits = cx.data.load_dataset("hf", tmp_path, num_classes=2)
    assert ([len(part) for part in splits[:3]], splits.info.num_classes) == ([18, 2, 3], 2)
    quantities = cx.data.load_dataset("hf", tmp_path, task="regression")
    assert quantities.info.num_classes == 1
    for part, size in zip(quantities[:3], (18, 2, 3), strict=True):
        targets = part.take(np.arange(size))[1]
        assert (targets.shape, targets.dtype) == ((size, 1), np.float32)


def test_array_records_by_number(tmp_path):
    module = pytest.importorskip(
        "array_record.python.array_record_module", reason="pip install 'cyxjax[grain]'"
    )
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for number in range(20):
        writer.write(bytes([number]))
    writer.close()
    named = {"decode": "tests.unit.data.test_extras:decode", "num_classes": 2}
    splits = cx.data.load_dataset("array_record", tmp_path, **named)
    inputs, targets = everything(splits)
    assert sorted(inputs[:, 0].tolist()) == list(range(20))
    assert targets.tolist() == (inputs[:, 0] % 2).tolist()
    with pytest.raises(ConfigError, match="needs options.decode"):
        cx.data.load_dataset("array_record", tmp_path)


def test_a_text_by_a_tokenizer_of_its_own(tmp_path, monkeypatch):
    words = ["the", "and", "cat", "dog", "emu", "unused"]
    stored = {"max_length": 512, "pad_to": 2048}

    def encode(text, add_special_tokens=True):
        ids = [5] * add_special_tokens + [words.index(word) for word in text.split()][: stored["max_length"]]
        return SimpleNamespace(ids=ids + [5] * (stored["pad_to"] - len(ids)))

    made = SimpleNamespace(  # like the library's Tokenizer, of a file that stores truncation and padding
        encode=encode,
        get_vocab_size=lambda: len(words),
        no_truncation=lambda: stored.update(max_length=None),
        no_padding=lambda: stored.update(pad_to=0),
    )
    library = SimpleNamespace(from_file={str(tmp_path / "tokenizer.json"): made}.__getitem__)
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=library))
    (tmp_path / "a.txt").write_text("the cat and the dog and the emu \n" * 200)
    named = {"tokenizer": str(tmp_path / "tokenizer.json"), "sequence_length": 4}
    splits = cx.data.load_dataset("text", tmp_path / "a.txt", **named)
    first, after = splits.train.take(np.arange(1))
    assert (first.tolist(), after.tolist()) == ([[0, 2, 1, 0]], [[2, 1, 0, 3]])
    assert (splits.info.num_classes, len(splits.train)) == (6, 319)  # 1,280 of 1,600 tokens
    with pytest.raises(DataError, match=r"bad\.json: "):
        cx.data.load_dataset("text", tmp_path / "a.txt", tokenizer=str(tmp_path / "bad.json"))
