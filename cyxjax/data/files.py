"""Loaders of datasets in files, also of images: a folder or file gives train, validation and test splits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data.columns import as_array, refuse_words
from cyxjax.data.formats import in_mode, read_cifar10, read_csv, read_idx, read_npy, read_npz
from cyxjax.data.sources import ArrayDataset, Dataset, ItemDataset
from cyxjax.data.splits import (
    VAL_NAMES,
    DatasetInfo,
    Splits,
    Task,
    as_images,
    describe,
    split_arrays,
    split_dataset,
)
from cyxjax.errors import DataError
from cyxjax.files import readable
from cyxjax.plugins import extra

_LAST_LABEL = 2**31 - 1  # labels are stored as int32
_PARTS = ("train", "val", "test")


def load_idx(name: str, inside: str, root: Path, val_fraction: float = 0.1, split_seed: int = 0) -> Splits:
    """IDX files under MNIST's names, gzipped or not: float32 (28, 28, 1) in [0, 1], int32 labels.

    inside: the folder in `root` that common tools unpack to. Validation samples are drawn from the training
    files; the test files stay the test set.
    """
    folder = _folder(root, inside)
    train, test = (
        _pixels(
            read_idx(_file(folder, f"{part}-images-idx3-ubyte", f"{part}-images.idx3-ubyte"), 3),
            read_idx(_file(folder, f"{part}-labels-idx1-ubyte", f"{part}-labels.idx1-ubyte"), 1),
        )
        for part in ("train", "t10k")
    )
    classes = int(max(train.targets.max(), test.targets.max())) + 1
    info = DatasetInfo(name, "classification", classes, test.inputs.shape[1:])
    return split_arrays(train, info, test, val_fraction=val_fraction, split_seed=split_seed)


def load_cifar10(root: Path, val_fraction: float = 0.1, split_seed: int = 0) -> Splits:
    """CIFAR-10's binary files: float32 (32, 32, 3) in [0, 1], int32 labels; validation as in `load_idx`."""
    folder = _folder(root, "cifar-10-batches-bin")
    parts = [read_cifar10(_file(folder, f"data_batch_{i}.bin")) for i in range(1, 6)]
    train = _pixels(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    test = _pixels(*read_cifar10(_file(folder, "test_batch.bin")))
    info = DatasetInfo("cifar10", "classification", 10, test.inputs.shape[1:])
    return split_arrays(train, info, test, val_fraction=val_fraction, split_seed=split_seed)


def _pixels(images: np.ndarray, labels: np.ndarray) -> ArrayDataset:
    """A dataset of pixel values up to 255, and labels."""
    return ArrayDataset(as_images(images, 255), labels.astype(np.int32))


def load_npz(root: Path, **split: Any) -> Splits:
    """An .npz file with x_train, y_train, x_val, y_val, x_test, y_test; or with x and y, to be split here.

    Integer targets mean classification, others regression.
    """
    arrays = {name.lower(): array for name, array in read_npz(root).items()}
    if {"x", "y"} <= arrays.keys():
        whole = ArrayDataset(as_array(arrays["x"]), _targets(root, arrays["y"]))
        return split_arrays(whole, describe("npz", whole), **split)
    names = [f"{kind}_{part}" for part in _PARTS for kind in ("x", "y")]
    if not set(names) <= arrays.keys():
        raise DataError(
            f"{root} holds {', '.join(sorted(arrays)) or 'nothing'}. "
            f"HINT: save x and y, or {', '.join(names)}."
        )
    train, val, test = (
        ArrayDataset(as_array(arrays[f"x_{part}"]), _targets(root, arrays[f"y_{part}"])) for part in _PARTS
    )
    info = describe("npz", train)
    if info.task == "classification":
        classes = max(int(part.targets.max()) for part in (train, val, test)) + 1
        info = replace(info, num_classes=classes)
    return Splits(train, val, test, info)


def load_npy(root: Path, **split: Any) -> Splits:
    """A folder with x.npy and y.npy, read from disk row by row, so that they may be larger than memory."""
    targets = _targets(root / "y.npy", np.asarray(read_npy(_file(root, "y.npy"))))
    whole = ArrayDataset(as_array(read_npy(_file(root, "x.npy"))), targets)
    return split_dataset(whole, describe("npy", whole), targets, **split)


def load_csv(root: Path, target: str | None = None, task: Task | None = None, **split: Any) -> Splits:
    """A CSV file with a header: float32 features from columns of numbers; `target` or the last is the target.

    `task` defaults to classification if all targets are words or whole numbers, else regression.
    """
    features, raw, classes, columns = read_csv(root, target, task)
    whole = ArrayDataset(features, _targets(root, raw))
    info = describe("csv", whole, class_names=tuple(classes), column_names=tuple(columns))
    return split_arrays(whole, info, **split)


def _targets(path: Path, raw: np.ndarray) -> np.ndarray:
    """Whole numbers as int32 class labels (N,); others as float32 (N, outputs)."""
    refuse_words(raw)
    if not raw.size:
        return raw  # ArrayDataset says what has no samples
    if raw.dtype.kind == "f":
        return raw.astype(np.float32).reshape(len(raw), -1)
    if raw.min() < 0 or raw.max() > _LAST_LABEL:
        raise DataError(
            f"{path}: labels {raw.min()} to {raw.max()}; expected 0 to {_LAST_LABEL}. "
            "HINT: number classes from 0; for a regression save float values."
        )
    return raw.astype(np.int32)


def _folder(root: Path, inside: str) -> Path:
    """`root/inside`, the folder that common tools unpack to, if it exists; else `root`."""
    return root / inside if (root / inside).is_dir() else root


def _file(folder: Path, *names: str) -> Path:
    """The file in `folder` under one of `names`, or the same with .gz."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(f"{folder}: no file {names[0]} (or {names[0]}.gz). HINT: set root to where it is.")


_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


@dataclass(frozen=True)
class ImageFiles:
    """Images of one size as float32 (size, size, 3 or 1) in [0, 1], with int32 labels, read by index."""

    paths: list[Path]
    labels: np.ndarray
    size: int
    grey: bool

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        path = self.paths[index]
        with readable(path), extra("PIL.Image", "pillow").open(path) as image:
            pixels = in_mode(image, "L" if self.grey else "RGB").resize((self.size, self.size))
        array = np.asarray(pixels, np.float32) / np.float32(255)
        return array.reshape(self.size, self.size, -1), self.labels[index]


def load_image_folder(
    root: Path, image_size: int = 32, grey: bool = False, num_workers: int = 2, **split: Any
) -> Splits:
    """root/CLASS/*.png or other images, split by class; or the same in root/train, root/val and root/test.

    Without root/val (or valid, validation) or root/test, that part is drawn from root/train. Classes are
    numbered in the order of their names. Images are resized to image_size x image_size. Files and folders
    whose names begin with a dot are ignored.
    """
    extra("PIL.Image", "pillow")
    is_split = bool(_classes(root / "train"))  # else "train" is a class
    folder = root / "train" if is_split else root
    classes = _classes(folder)
    shape = (image_size, image_size, 1 if grey else 3)
    info = DatasetInfo("image_folder", "classification", len(classes), shape, class_names=tuple(classes))

    def images(folder: Path) -> ImageFiles:
        return ImageFiles(*_scan(folder, classes), image_size, grey)

    def stored(*names: str) -> Dataset | None:
        found = [root / name for name in names if is_split and (root / name).is_dir()]
        return ItemDataset(images(found[0]), num_workers) if found else None

    whole, rest = images(folder), (stored(*VAL_NAMES), stored("test"))
    return split_dataset(ItemDataset(whole, num_workers), info, whole.labels, rest, **split)


def _classes(folder: Path) -> list[str]:
    """Names of the folders in `folder`, sorted; [] if it does not exist."""
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())


def _scan(folder: Path, classes: list[str]) -> tuple[list[Path], np.ndarray]:
    """Paths of all images under `folder`, sorted, with the number of their class."""
    for unknown in sorted({*_classes(folder)} - {*classes}):
        raise DataError(
            f"{folder}: class {unknown!r} is not among the training classes. HINT: rename the folder."
        )
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise DataError(f"{folder}: no images in class folders. HINT: expected files such as cat/a.png.")
    return [path for path, _ in found], np.array([label for _, label in found], np.int32)
