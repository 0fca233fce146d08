"""Data sets kept in files, images among them: from a folder or file to train, validation and test splits."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data.formats import read_cifar10, read_csv, read_idx, read_npy, read_npz
from cyxjax.data.items import ItemDataset
from cyxjax.data.sources import ArrayDataset
from cyxjax.data.splits import (
    DatasetInfo,
    Splits,
    Task,
    as_images,
    split_arrays,
    split_dataset,
    split_rows,
    stratified_rows,
)
from cyxjax.errors import DataError
from cyxjax.plugins import extra

_LAST_LABEL = 2**31 - 1  # as int32, which is how labels are kept


def load_mnist(root: Path, val_fraction: float = 0.1, split_seed: int = 0) -> Splits:
    """IDX files under MNIST's names, gzipped or not: float32 (28, 28, 1) in [0, 1], int32 labels.

    Validation samples are drawn from the training files; the test files stay the test set.
    """
    return _load_idx(_folder(root, "MNIST/raw"), "mnist", val_fraction, split_seed)


def load_fashion_mnist(root: Path, val_fraction: float = 0.1, split_seed: int = 0) -> Splits:
    """Fashion-MNIST: clothes, in files named and split as in `load_mnist`."""
    return _load_idx(_folder(root, "FashionMNIST/raw"), "fashion_mnist", val_fraction, split_seed)


def _load_idx(folder: Path, name: str, val_fraction: float, split_seed: int) -> Splits:
    images, labels = _idx_pair(folder, "train")
    test_images, test_labels = _idx_pair(folder, "t10k")
    shape = (*images.shape[1:], 1)
    info = DatasetInfo(name, "classification", int(max(labels.max(), test_labels.max())) + 1, shape)
    return _with_test((images, labels), (test_images, test_labels), info, val_fraction, split_seed)


def load_cifar10(root: Path, val_fraction: float = 0.1, split_seed: int = 0) -> Splits:
    """CIFAR-10's binary files: float32 (32, 32, 3) in [0, 1], int32 labels; validation as in `load_mnist`."""
    folder = _folder(root, "cifar-10-batches-bin")
    parts = [read_cifar10(_file(folder, f"data_batch_{i}.bin")) for i in range(1, 6)]
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    test_images, test_labels = read_cifar10(_file(folder, "test_batch.bin"))
    info = DatasetInfo("cifar10", "classification", 10, images.shape[1:])
    return _with_test((images, labels), (test_images, test_labels), info, val_fraction, split_seed)


def load_npz(root: Path, **split: Any) -> Splits:
    """An .npz file with x_train, y_train, x_val, y_val, x_test, y_test; or with x and y, to be split here.

    Whole-number targets mean classification, others regression.
    """
    arrays = {name.lower(): array for name, array in read_npz(root).items()}
    if {"x", "y"} <= arrays.keys():
        targets = _targets(root, arrays["y"])
        return split_arrays(arrays["x"], targets, _describe("npz", arrays["x"], targets), **split)
    names = [f"{kind}_{part}" for part in ("train", "val", "test") for kind in ("x", "y")]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"{root}: no array {missing[0]!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}. "
            f"HINT: save x and y, or {', '.join(names)}."
        )
    parts = [(arrays[f"x_{part}"], _targets(root, arrays[f"y_{part}"])) for part in ("train", "val", "test")]
    info = _describe("npz", parts[0][0], np.concatenate([y for _, y in parts]))
    train, val, test = [ArrayDataset(x, y) for x, y in parts]
    return Splits(train, val, test, info)


def load_npy(root: Path, **split: Any) -> Splits:
    """A folder with x.npy and y.npy, read from disk row by row, so they may be larger than memory."""
    inputs = read_npy(_file(root, "x.npy"))
    targets = _targets(root / "y.npy", np.asarray(read_npy(_file(root, "y.npy"))))
    info = _describe("npy", inputs, targets)
    return split_dataset(ArrayDataset(inputs, targets), info, targets, **split)


def load_csv(root: Path, target: str | None = None, task: Task | None = None, **split: Any) -> Splits:
    """A CSV file with a header: columns of numbers as float32 features; the last, or `target`, is the target.

    `task` defaults to classification where all targets are words or whole numbers, else regression.
    """
    features, raw, classes, columns = read_csv(root, target)
    if task == "classification" and raw.dtype.kind == "f":
        raise DataError(f"{root}: class labels must be integers or strings. HINT: set task to regression.")
    if task == "regression" and classes:
        raise DataError(
            f"{root}: the target holds strings, such as {classes[0]!r}. HINT: set task to classification."
        )
    targets = _targets(root, raw.astype(np.float32) if task == "regression" else raw)
    info = _describe("csv", features, targets)
    info = replace(info, class_names=tuple(classes), column_names=tuple(columns))
    return split_arrays(features, targets, info, **split)


def _with_test(
    known: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    info: DatasetInfo,
    val_fraction: float,
    split_seed: int,
) -> Splits:
    """known, test: pixels up to 255, and labels. Of each class of the known a fraction is for validation."""
    train, val = stratified_rows(known[1], (1 - val_fraction, val_fraction), split_seed)
    images, labels = as_images(known[0], 255), known[1]
    return Splits(
        ArrayDataset(images[train], labels[train]),
        ArrayDataset(images[val], labels[val]),
        ArrayDataset(as_images(test[0], 255), test[1]),
        info,
    )


def _idx_pair(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(_file(folder, f"{part}-images-idx3-ubyte", f"{part}-images.idx3-ubyte"), 3)
    labels = read_idx(_file(folder, f"{part}-labels-idx1-ubyte", f"{part}-labels.idx1-ubyte"), 1).astype(
        np.int32
    )
    if len(images) != len(labels):
        raise DataError(
            f"{folder}: {len(images)} {part} images and {len(labels)} labels. HINT: fetch both files again."
        )
    return images, labels


def _describe(name: str, inputs: np.ndarray, targets: np.ndarray) -> DatasetInfo:
    if targets.dtype.kind == "i":
        return DatasetInfo(name, "classification", int(targets.max()) + 1, inputs.shape[1:])
    return DatasetInfo(name, "regression", targets.shape[-1], inputs.shape[1:])


def _targets(path: Path, raw: np.ndarray) -> np.ndarray:
    """Whole numbers as int32 class labels (N,); others as float32 (N, outputs)."""
    if raw.dtype.kind not in "biuf" or raw.size == 0:
        raise DataError(f"{path}: targets of dtype {raw.dtype}, shape {raw.shape}. HINT: save numbers.")
    if raw.dtype.kind == "f":
        return raw.astype(np.float32).reshape(len(raw), -1)
    wrong = np.argwhere((raw < 0) | (raw > _LAST_LABEL))
    if wrong.size:
        raise DataError(
            f"{path}: label {raw[tuple(wrong[0])]} in row {wrong[0][0]}; expected 0 to {_LAST_LABEL}. "
            "HINT: number classes from 0; quantities are a regression, as float values."
        )
    return raw.astype(np.int32)


def _folder(root: Path, inside: str) -> Path:
    """`root/inside`, where common tools unpack the files, if it exists; else `root`."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. HINT: set root to where the data files are.")
    return root / inside if (root / inside).is_dir() else root


def _file(folder: Path, *names: str) -> Path:
    """The file in `folder` under one of `names`, or the same with .gz."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise DataError(f"{folder}: no file {names[0]} (or {names[0]}.gz). HINT: set root to where it is.")


_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm"}
_PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class ImageFiles:
    """Images of one size as float32 (size, size, 3 or 1) in [0, 1], with int32 labels, read by index."""

    paths: tuple[Path, ...]
    labels: np.ndarray
    size: int
    grey: bool

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        path = self.paths[index]
        try:
            with _pillow().open(path) as image:
                pixels = image.convert("L" if self.grey else "RGB").resize((self.size, self.size))
        except (OSError, SyntaxError, ValueError) as error:  # of Pillow's decoders: not all name the file
            raise DataError(f"{path} cannot be read ({error}). HINT: restore that file.") from error
        array = np.asarray(pixels, np.float32) / np.float32(255)
        return array.reshape(self.size, self.size, -1), self.labels[index]


def load_image_folder(
    root: Path, image_size: int = 32, grey: bool = False, num_workers: int = 2, **split: Any
) -> Splits:
    """root/CLASS/*.png and the like, split class by class; or root/train, root/val and root/test of these.

    Classes are numbered in the order of their names. Images are resized to image_size x image_size.
    """
    _pillow()
    given = all((root / part).is_dir() for part in _PARTS)
    classes = _classes(root / "train" if given else root)
    if given:
        found = [_scan(root / part, classes) for part in _PARTS]
    else:
        paths, labels = _scan(root, classes)
        rows = split_rows(labels, "classification", **split)
        found = [([paths[i] for i in part], labels[part]) for part in rows]
    images = [ImageFiles(tuple(paths), labels, image_size, grey) for paths, labels in found]
    train, val, test = [ItemDataset(one, num_workers) for one in images]
    shape = (image_size, image_size, 1 if grey else 3)
    info = DatasetInfo("image_folder", "classification", len(classes), shape, class_names=tuple(classes))
    return Splits(train, val, test, info)


def _pillow() -> Any:
    return extra("PIL.Image", "pillow")


def _classes(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"{folder}: no class folders. HINT: put each class's images in a folder of its own.")
    return names


def _scan(folder: Path, classes: list[str]) -> tuple[list[Path], np.ndarray]:
    """Paths of all images under `folder`, sorted, with the number of their class."""
    unknown = [path.name for path in folder.iterdir() if path.is_dir() and path.name not in classes]
    if unknown:
        raise DataError(
            f"{folder}: class {sorted(unknown)[0]!r} is not among the training classes. HINT: rename it."
        )
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not found:
        raise DataError(f"{folder}: no images. HINT: expected files such as {folder / classes[0] / 'a.png'}.")
    return [path for path, _ in found], np.array([label for _, label in found], np.int32)
