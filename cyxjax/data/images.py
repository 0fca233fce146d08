"""A folder of images, one subfolder a class, decoded by Pillow when a batch asks for them."""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.data.items import ItemDataset
from cyxjax.data.splits import DatasetInfo, Splits, split_rows
from cyxjax.errors import ConfigError, DataError

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
        except (
            OSError,
            SyntaxError,
            ValueError,
        ) as error:  # what Pillow's decoders raise: not all name the file
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
    build = partial(_dataset, size=image_size, grey=grey, num_workers=num_workers)
    if given:
        parts = [build(*_scan(root / part, classes)) for part in _PARTS]
    else:
        paths, labels = _scan(root, classes)
        rows = split_rows(labels, "classification", **split)
        parts = [build([paths[i] for i in part], labels[part]) for part in rows]
    train, val, test = parts
    shape = (image_size, image_size, 1 if grey else 3)
    info = DatasetInfo("image_folder", "classification", len(classes), shape, class_names=tuple(classes))
    return Splits(train, val, test, info)


def _dataset(paths: list[Path], labels: np.ndarray, size: int, grey: bool, num_workers: int) -> ItemDataset:
    return ItemDataset(ImageFiles(tuple(paths), labels, size, grey), num_workers)


def _classes(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not names:
        raise DataError(f"{folder}: no class folders. HINT: put each class's images in a folder of its own.")
    return names


def _scan(folder: Path, classes: list[str]) -> tuple[list[Path], np.ndarray]:
    """Paths of all images under `folder`, sorted, with the number of their class."""
    strange = [path.name for path in folder.iterdir() if path.is_dir() and path.name not in classes]
    if strange:
        raise DataError(
            f"{folder}: class {sorted(strange)[0]!r} is not among the training classes. HINT: rename it."
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


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(f"image folders need Pillow ({error}). HINT: pip install pillow.") from error
