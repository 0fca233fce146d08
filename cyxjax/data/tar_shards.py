"""Samples in tar files, in the layout of webdataset: `00017.jpg` and `00017.cls` are one sample.

The files are indexed once, by their headers; then a sample is read by its number. So samples of all shards
can be shuffled, resumed and audited like those of any dataset; nothing is unpacked to disk.
"""

import glob
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cyxjax.data.formats import in_mode
from cyxjax.errors import DataError
from cyxjax.files import readable
from cyxjax.plugins import extra

Decoder = Callable[[bytes], Any]


class _Place(NamedTuple):
    file: int
    offset: int
    size: int


def _image(data: bytes) -> np.ndarray:
    with extra("PIL.Image", "pillow").open(io.BytesIO(data)) as image:
        return np.asarray(in_mode(image, "RGB"), np.float32) / np.float32(255)


def _array(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _number(data: bytes) -> np.int32:
    return np.int32(int(data))


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "ppm"), _image),
    **dict.fromkeys(("cls", "cls2", "index", "id"), _number),
    "npy": _array,
    "json": lambda data: json.loads(data),
    "txt": lambda data: data.decode(),
}


class TarShards:
    """A dataset over tar files: item i is the decoded (inputs, targets) of sample i.

    paths: files, or one pattern such as "train-*.tar" (sorted). inputs, targets: members of a sample, by the
    part of their names after the first dot; several inputs make a dict. decode: functions bytes -> value by
    member, which replace ours (images as float32 in [0, 1], cls as an integer, npy, json, txt); ours decode
    by what follows the last dot (`x.npy`).
    Raises: DataError for files that are missing, compressed or cut short, for a sample without a member, and
        for a member that cannot be decoded.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        inputs: str | Sequence[str] = "jpg",
        targets: str | None = "cls",
        decode: Mapping[str, Decoder] | None = None,
    ):
        if isinstance(paths, str | Path):  # the name of a file may hold the characters of a pattern
            found = [paths] if Path(paths).is_file() else sorted(glob.glob(str(paths)))
        else:
            found = list(paths)
        if not found:
            raise DataError(f"{paths}: no such file. HINT: a pattern such as 'data/train-*.tar'.")
        self._paths = [Path(path) for path in found]
        self._inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        self._alone, self._targets = isinstance(inputs, str), targets
        self._wanted = (*self._inputs, *([targets] if targets else []))
        self._decode = {name: _decoder_of(name, decode or {}) for name in self._wanted}
        samples: dict[tuple[int, str], dict[str, _Place]] = {}
        for number, path in enumerate(self._paths):
            for key, member, place in _members(number, path):
                samples.setdefault((number, key), {})[member] = place
        self._samples = [self._checked(*key, sample) for key, sample in samples.items()]

    def _checked(self, number: int, key: str, sample: dict[str, _Place]) -> dict[str, _Place]:
        with readable(f"{self._paths[number]}: sample {key!r}", hint=f"it has {', '.join(sample)}"):
            return {name: sample[name] for name in self._wanted}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        values = {name: self._read(name, place) for name, place in sample.items()}
        target = values[self._targets] if self._targets else None
        inputs = values[self._inputs[0]] if self._alone else {name: values[name] for name in self._inputs}
        return inputs if self._targets is None else (inputs, target)

    def _read(self, name: str, place: _Place) -> Any:
        path = self._paths[place.file]
        with readable(f"{name!r} of {path}"), path.open("rb") as file:  # several threads read items
            file.seek(place.offset)
            if len(data := file.read(place.size)) != place.size:
                raise ValueError("the file is truncated")
            return self._decode[name](data)


def _decoder_of(member: str, decode: Mapping[str, Decoder]) -> Decoder:
    """The decoder of a member: from `decode`, or ours by its name or what follows the last dot in it."""
    found = decode.get(member) or _DECODERS.get(member.rpartition(".")[2])
    if found is None:
        raise DataError(
            f"{member!r} has no decoder; there are some for {', '.join(_DECODERS)}. "
            f"HINT: decode={{{member!r}: a function of the bytes}}."
        )
    return found


def _members(number: int, path: Path) -> Iterator[tuple[str, str, _Place]]:
    """(sample, member, position) of every file in a tar. Raises: DataError for a link or a sparse file."""
    import tarfile  # here: most runs read no tar

    hint = (
        "take another copy, close the file after writing (a tar ends with blocks of zeros), or unpack .tar.gz"
    )
    with readable(path, hint=hint), path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
        files = list(archive)
        file.seek(archive.offset)  # tarfile takes a damaged or missing header for the end
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise ValueError(f"damaged or cut short after byte {archive.offset}")
    for info in files:
        folder, slash, name = info.name.rpartition("/")
        key, dot, member = name.partition(".")
        if not (dot and key) or info.isdir():
            continue
        if not info.isfile() or info.issparse():  # the bytes of a link are elsewhere, of a sparse file packed
            what, flags = ("sparse", "without -S") if info.issparse() else ("a link", "--hard-dereference -h")
            raise DataError(f"{path}: {info.name!r} is {what}. HINT: pack it anew, tar {flags}.")
        yield f"{folder}{slash}{key}", member.lower(), _Place(number, info.offset_data, info.size)
