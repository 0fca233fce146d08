"""The manifest of a finished checkpoint step, `MANIFEST.json`, and the check of its files against it.

A step exists only if its manifest verifies. Nothing here imports jax, so that listing and verifying are fast,
and nothing is ever unpickled.
"""

import hashlib
import json
import math
import os
import platform
import stat
import sys
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter

from cyxjax.errors import CheckpointError
from cyxjax.files import read_plain

FORMAT = "cyxjax-checkpoint"
# Readers accept every minor version of their major one: a minor version only adds optional fields.
FORMAT_VERSION = (2, 0)
# Written if a state is distributed: each process stores its pieces of the leaves, flat, in its own file.
BY_SHARE = (3, 0)
READS = (2, 3)  # major versions
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 256 << 20  # far more than a run writes: no larger file is read
_PACKAGES = ("cyxjax", "jax", "flax", "optax", "numpy")
_DTYPES = frozenset(
    ["bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
)
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}"  # of a path
Natural = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A whole number of a manifest."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of a leaf in C order, in the file of `process`; the crc32 of their bytes."""

    process: Natural
    start: Natural
    stop: Natural
    crc32: Natural


def file_of(process: int) -> str:
    """The file of a step's arrays that `process` writes."""
    return f"process_{process:05d}.safetensors"


def _are_all(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether the spans, in their order, cover each of `size` elements once."""
    ends, starts = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), size]
    return ends == starts and all(start < stop for start, stop in spans)


@dataclass(frozen=True)
class Leaf:
    """One array of the state: name in the tree, shape, dtype name, crc32 of its bytes in C order.

    pieces: where its elements are, in order, each with its own crc32, and that of the leaf is 0; (): the
    whole leaf is in the file of the first process.
    """

    name: str
    shape: tuple[Natural, ...]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(sorted(_DTYPES))})$")]
    crc32: Natural
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        spans = [(piece.start, piece.stop) for piece in self.pieces]
        if spans and not _are_all(spans, self.size):
            raise CheckpointError(
                f"State leaf {self.name[:60]!r}: pieces {str(spans)[:100]} are not {self.size} elements. "
                "HINT: save the same state on all processes."
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def numpy_dtype(self) -> np.dtype:
        return dtype_of(self.dtype)


def dtype_of(name: str) -> np.dtype:
    """The dtype with this name in numpy or ml_dtypes. Raises: TypeError."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, None) or name)


@cache  # a model has thousands of leaves and a few dtypes, whose names numpy would build each time
def dtype_name(dtype: Any) -> str:
    """The name of a dtype in manifests; `is_storable` says whether it can be stored."""
    return str(dtype)


def is_storable(dtype: Any) -> bool:
    """Whether a checkpoint may hold arrays of this dtype: numbers in the machine's byte order."""
    return dtype_name(dtype) in _DTYPES


@dataclass(frozen=True)
class FileEntry:
    """One file of the step: path below the step's folder (posix), size, and sha256 in hex."""

    path: Annotated[str, Field(pattern=f"^{_PART}(/{_PART})*$")]  # no path out of the folder
    num_bytes: Natural
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Manifest:
    """Everything known about one step except its arrays. `meta` is the JSON object of the caller."""

    step: Natural
    leaves: tuple[Leaf, ...]
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    metric: float | None
    versions: dict[str, str]
    created_unix_s: Annotated[float, Field(strict=True, ge=0, lt=1e11)]  # larger values have no calendar date
    format_version: tuple[Natural, Natural] = FORMAT_VERSION

    @cached_property
    def leaf_of(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self.leaves}

    @cached_property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files)

    def encode(self) -> bytes:
        """Canonical JSON with a digest: the same manifest gives the same bytes everywhere."""
        body: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        body |= {"format": FORMAT, "leaves": [_without_empty(vars(x)) for x in self.leaves]}
        body |= {"files": [vars(x) for x in self.files]}
        return _sealed(body)


def _without_empty(leaf: dict[str, Any]) -> dict[str, Any]:
    """The leaf without an empty `pieces`: older versions have no such field."""
    return {key: value for key, value in leaf.items() if key != "pieces" or value}


def frozen_json(value: dict[str, Any]) -> dict[str, Any]:
    """`value` as it will be read back: an independent copy with tuples as lists and keys as strings.

    NaN and infinities are allowed: a diverged loss in the history must not prevent a save.
    Raises: TypeError, ValueError if it is not JSON.
    """
    return dict(json.loads(json.dumps(value)))


def loaded_versions() -> dict[str, str]:
    """Versions of the packages that affect a checkpoint, as information for later readers."""
    found = {name: sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules}
    return found | {"python": platform.python_version()}


@cache
def _fields() -> TypeAdapter[Manifest]:
    """Checks the fields of a manifest; fields that a later minor version adds are ignored."""
    return TypeAdapter(Manifest)


def decode(data: bytes) -> Manifest:
    """The manifest in `data`.

    Raises: CheckpointError for anything except the exact bytes of `encode` in a version that can be read.
    """
    try:
        body = json.loads(data.decode("utf-8"))["manifest"]
        if _sealed(body) != data:
            raise ValueError("its own digest does not match")
        if body["format"] != FORMAT or body["format_version"][0] not in READS:
            raise ValueError(
                f"format {body['format']!r} version {body['format_version']}; this cyxjax reads {FORMAT!r} "
                f"versions {', '.join(f'{major}.x' for major in READS)}"
            )
        return _fields().validate_python(body)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise CheckpointError(
            f"{MANIFEST} is not readable: {reason[:200]}. HINT: restore another step."
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the step in `folder`, checked against its own digest; files are not checked.

    Raises: CheckpointError if it is missing, too large or altered.
    """
    return decode(manifest_bytes(folder))


def manifest_bytes(folder: Path) -> bytes:
    """The unchecked bytes of the manifest of the step in `folder`.

    Raises: CheckpointError, with nothing read, if it is missing, not a regular file or too large.
    """
    try:
        return read_plain(folder / MANIFEST, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror}. HINT: restore another step.") from error


def find_problems(folder: Path, step: int, share: tuple[int, int] = (0, 1)) -> list[str]:
    """The problems of the step in `folder`; [] if exactly its files exist, each with its digest.

    share: (i, n): reads the contents of every n-th file only, starting with the i-th.
    """
    try:
        manifest = read_manifest(folder)
        found = {path: folder / path for path in list_files(folder) if path != MANIFEST}
        problems = [] if manifest.step == step else [f"its manifest is of step {manifest.step}"]
        listed = {entry.path for entry in manifest.files}
        problems += [f"{path!r} is not in the manifest" for path in sorted(set(found) - listed)]
        mine, of = share
        return problems + [
            problem
            for i, entry in enumerate(manifest.files)
            if (problem := _file_problem(entry, found.get(entry.path), is_read=i % of == mine))
        ]
    except (CheckpointError, OSError) as error:
        return [str(error).partition(" HINT:")[0].rstrip(".")]


def describe_file(folder: Path, path: str) -> FileEntry:
    """The entry of the file `path` below `folder`, fsynced and read back."""
    return FileEntry(path, (folder / path).stat().st_size, _sha256(folder / path, sync=True))


def list_files(folder: Path) -> list[str]:
    """Paths of the plain files below `folder`, relative and sorted.

    Raises: CheckpointError for a symlink or a special file: a checkpoint has neither.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            found.append(path.relative_to(folder).as_posix())
        elif not stat.S_ISDIR(mode):
            raise CheckpointError(
                f"{str(path)!r} is a link or special file; a checkpoint has none. HINT: remove it."
            )
    return found


def _file_problem(entry: FileEntry, path: Path | None, *, is_read: bool) -> str:
    if path is None:
        return f"{entry.path} is missing"
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        return f"{entry.path} has {num_bytes} bytes, not {entry.num_bytes}"
    if is_read and _sha256(path) != entry.sha256:
        return f"{entry.path} has another sha256: its content was altered"
    return ""


def _sha256(path: Path, *, sync: bool = False) -> str:
    # O_NOFOLLOW: a link created between listing and reading is an error, not a way out of the folder.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if sync:
            os.fsync(fd)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"manifest":{text},"sha256":"{digest}"}}\n'.encode()
