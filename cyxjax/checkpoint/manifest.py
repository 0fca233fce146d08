"""What a finished checkpoint step says about itself: `MANIFEST.json`, and whether its files still agree.

A step exists only if its manifest verifies. Nothing here imports jax: listing and verifying are quick,
and nothing here or below ever unpickles.
"""

import functools
import hashlib
import json
import math
import platform
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter

from cyxjax.checkpoint.pieces import Natural, Piece, find_gap, joined_crc32
from cyxjax.errors import CheckpointError

FORMAT = "cyxjax-checkpoint"
# Readers accept every minor version of their major one: a minor version only adds optional fields.
FORMAT_VERSION = (2, 0)
# Written where a state is spread over processes: each keeps its pieces of the leaves, flat, in its own file.
BY_SHARE = (3, 0)
READS = (2, 3)  # major versions
MANIFEST = "MANIFEST.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_DIMS = 32
_DTYPES = frozenset(
    ["bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
)
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}"  # of a path


def _known_dtype(name: str) -> str:
    if name not in _DTYPES:
        raise ValueError(f"dtype {name[:60]!r}")
    return name


@dataclass(frozen=True)
class Leaf:
    """One array of the state: name in the tree, shape, dtype name, crc32 of its bytes in C order.

    pieces: where its elements are, in order; (): the whole of it is in the first process's file.
    """

    name: str
    shape: Annotated[tuple[Natural, ...], Field(max_length=MAX_DIMS)]
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    crc32: Natural
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if self.pieces and (gap := find_gap(self.pieces, self.size)):
            what = f"State leaf {self.name[:60]!r}: {gap}"
            raise CheckpointError(f"{what}. HINT: all processes save the same state.")

    @classmethod
    def of(cls, name: str, array: Any, crc32: int) -> "Leaf":
        """The whole leaf that `array` is, whose bytes have that crc32."""
        return cls(name, tuple(array.shape), _name_of(array.dtype), crc32)

    @classmethod
    def in_pieces(cls, name: str, shape: tuple[int, ...], dtype: Any, pieces: tuple[Piece, ...]) -> "Leaf":
        """The leaf that `pieces`, sorted, make up. Raises: CheckpointError where one is missing."""
        dtype = np.dtype(dtype)
        return cls(name, tuple(shape), dtype.name, joined_crc32(pieces, dtype.itemsize), pieces)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def numpy_dtype(self) -> np.dtype:
        return dtype_of(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.size * self.numpy_dtype.itemsize


def dtype_of(name: str) -> np.dtype:
    """The dtype of this name, numpy's or ml_dtypes'. Raises: TypeError."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, None) or name)


@cache  # a model has thousands of leaves and a few dtypes; numpy puts their names together anew each time
def _text_of(dtype: Any) -> str:
    return str(dtype)


@cache
def _name_of(dtype: np.dtype) -> str:
    return np.dtype(dtype).name


def refuse_dtype(name: str, dtype: Any) -> None:
    """Raises: CheckpointError for a dtype that has no place in a checkpoint (object, string, ...)."""
    if _text_of(dtype) not in _DTYPES:
        raise CheckpointError(
            f"State leaf {name!r} is of dtype {dtype}; checkpoints hold numbers. HINT: put it in meta."
        )


@dataclass(frozen=True)
class FileEntry:
    """One file of the step: path below the step's folder (posix), size, and sha256 in hex."""

    path: Annotated[str, Field(pattern=f"^{_PART}(/{_PART})*$")]  # none that leaves the folder
    num_bytes: Natural
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Manifest:
    """Everything known about one step but its arrays. `meta` is the caller's own JSON object."""

    step: Natural
    leaves: tuple[Leaf, ...]
    files: tuple[FileEntry, ...]
    meta: dict[str, Any]
    metric: float | None
    versions: dict[str, str]
    created_unix_s: Annotated[float, Field(strict=True, ge=0, lt=1e11)]  # beyond, no calendar has a date
    format_version: tuple[Natural, Natural] = FORMAT_VERSION

    @cached_property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files)

    def encode(self) -> bytes:
        """Canonical JSON with its own digest: the same manifest gives the same bytes everywhere."""
        body: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        body |= {"format": FORMAT, "leaves": [_without_empty(vars(x)) for x in self.leaves]}
        body |= {"files": [vars(x) for x in self.files]}
        data = _sealed(frozen_json(body, f"manifest of step {self.step}"))
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"The manifest of step {self.step} would have {len(data)} bytes, readers take "
                f"{MAX_MANIFEST_BYTES}. HINT: put less into meta, or save from fewer processes."
            )
        return data


def _without_empty(leaf: dict[str, Any]) -> dict[str, Any]:
    """Without `pieces` where there are none: the older versions know no such field."""
    return {key: value for key, value in leaf.items() if key != "pieces" or value}


def frozen_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """`value` as it will be read back: a copy that no later change reaches, tuples as lists, keys as strings.

    Raises: CheckpointError naming `what` if it is not JSON. NaN and infinities are allowed: a diverged
        loss in the history must not keep a run from being saved.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The {what} is not JSON: {error}. HINT: numbers, strings, lists and dicts only."
        ) from error


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Versions of the packages that shape a checkpoint, for the people who will read it later."""
    # Once a process: finding them takes longer than all else of a small save.
    names = ("cyxjax", "jax", "flax", "optax", "safetensors", "numpy")
    found = {name: metadata.version(name) for name in names if _is_installed(name)}
    return MappingProxyType(found | {"python": platform.python_version()})


@cache
def _fields() -> TypeAdapter[Manifest]:
    """Checks the fields of a manifest; those that a later minor version adds are left out."""
    return TypeAdapter(Manifest)


def decode(data: bytes) -> Manifest:
    """The manifest in `data`.

    Raises: CheckpointError for anything but the exact bytes `encode` made with a version that can be read.
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
        manifest = _fields().validate_python(body)
        _refuse_twins("leaf", [leaf.name for leaf in manifest.leaves])
        _refuse_twins("file", [entry.path for entry in manifest.files])
        return manifest
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise CheckpointError(
            f"{MANIFEST} is not readable: {reason[:200]}. HINT: restore another step."
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the step in `folder`, its text checked against its own digest, files not looked at.

    Raises: CheckpointError if it is missing, a link, too large or altered.
    """
    return decode(manifest_bytes(folder))


def manifest_bytes(folder: Path) -> bytes:
    """What stands in the manifest of the step in `folder`, of which nothing is believed yet.

    Raises: CheckpointError, with nothing read, if it is missing, no plain file or too large.
    """
    path = folder / MANIFEST
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{MANIFEST} is no plain file below {MAX_MANIFEST_BYTES} bytes. HINT: restore another step."
            )
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: {error.strerror}. HINT: restore another step.") from error


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _sealed(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"manifest":{text},"sha256":"{digest}"}}\n'.encode()


def _refuse_twins(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name!r} is listed twice")
        seen.add(name)
