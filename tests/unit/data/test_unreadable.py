"""Data that cannot be used as it lies there: refused in one line that names the file and what to do."""

import numpy as np
import pytest

from cyxjax.data.catalog import as_splits, load_dataset
from cyxjax.errors import ConfigError, DataError

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


def test_targets_that_are_no_numbers_are_refused(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.ones((4, 2), np.float32), y=np.array(list("abcd")))
    with pytest.raises(DataError, match="'a'.*np.unique"):
        load_dataset("npz", tmp_path / "d.npz")


def write_image(path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", (4, 4)).save(path)


def test_a_folder_of_images_is_refused_by_what_it_lacks(tmp_path):
    pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
    with pytest.raises(DataError, match=f"^{tmp_path}: "):
        load_dataset("image_folder", tmp_path)


def test_images_that_are_split_already_keep_their_parts(tmp_path):
    for part, count in {"train": 3, "val": 2, "test": 1}.items():
        for number in range(count):
            for name in ("cat", "dog"):
                write_image(tmp_path / part / name / f"{number}.png")
    splits = load_dataset("image_folder", tmp_path, image_size=4)
    assert [len(part) for part in splits[:3]] == [6, 4, 2]


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
