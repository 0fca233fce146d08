"""Shared functions for files. Standard library only.

A file is written whole (after a crash, and for a reader, it is the old one or the new one), or appended to
(all of the data or none of it). Files to read are opened by `open_plain`, which accepts only plain files: a
FIFO would block and a device would never end.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from cyxjax.errors import CyxjaxError, DataError

PRIVATE = 0o600
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")  # dist: of Debian


def is_installed(file: str) -> bool:
    """Whether a source file belongs to an installed package."""
    return bool(_INSTALLED.search(file))


def write_whole(
    path: str | os.PathLike[str], data: str | bytes, *, mode: int = 0o666, synced: bool = True
) -> None:
    """Replaces the file at `path` by `data` (text as UTF-8) in one step; what it wrote survives a power cut.

    mode: of the file, less the umask. A symbolic link is replaced, not followed. synced: False where the
    reader would notice a file damaged by a power cut; then nothing waits for the disk.
    Raises: OSError, also where `path` is a FIFO, a device or a folder; the file is then unchanged.
    """
    with replacing(path, synced=synced) as draft:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: str | os.PathLike[str], *, synced: bool = True) -> Iterator[Path]:
    """A path to write a new file at, which replaces `path` when the block succeeds.

    Raises: OSError, also where `path` is a FIFO, a device or a folder; the file is then unchanged.
    """
    path = Path(path)
    with suppress(FileNotFoundError):
        _refuse_mode(path, os.stat(path).st_mode)  # /dev/null or /dev/stdout must not be replaced
    draft = path.with_name(f".{path.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        if synced:
            sync(draft)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    if synced:
        sync(path.parent)


def open_plain(path: str | os.PathLike[str], mode: Literal["rb", "r"], **options: Any) -> IO[Any]:
    """Opens a plain file, or what a link to one points to, to read.

    options: of `open`. Raises: OSError, without waiting, if it is missing, unreadable or not a plain file.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_mode(path, os.fstat(fd).st_mode)
        return os.fdopen(fd, mode, **options)
    except BaseException:
        os.close(fd)
        raise


def append(path: str | os.PathLike[str], data: bytes, *, durable: bool = True) -> None:
    """Appends all of `data`, whole lines, to the file and waits until they are on the disk, or appends none.

    A last line that a power cut left without its end is ended first.

    durable: waits for the disk; without it a power cut, not a crash of the process, may lose the data.
    Raises: OSError; also where `path` is a symbolic link, which is not followed.
    """
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FLAGS, 0o666)
    with os.fdopen(fd, "ab", buffering=0) as file:
        _refuse_mode(path, os.fstat(fd).st_mode)
        before = os.fstat(fd).st_size
        if before and os.pread(fd, 1, before - 1) != b"\n":
            data = b"\n" + data
        try:
            while data:
                data = data[file.write(data) :]
            if durable:
                os.fsync(fd)
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise


def read_plain(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """The bytes of a plain file, or of what a link to one points to.

    Raises: OSError, immediately, if it is missing, unreadable, not a plain file, or above `max_bytes`.
    """
    with open_plain(path, "rb") as file:
        if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"holds more than {max_bytes} bytes", str(path))
        return bytes(file.read())


def text_in(path: str | os.PathLike[str]) -> str:
    """The text of a file of the system or of a process of ours; "" if it does not exist, or no longer."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@contextmanager
def readable(
    path: str | os.PathLike[str],
    kind: type[CyxjaxError] = DataError,
    hint: str = "check the file, or take another copy",
) -> Iterator[None]:
    """A block that reads `path`: an exception of a format's library becomes a `kind` that names the path.

    Raises: `kind`; our own errors as they are.
    """
    try:
        yield
    except Exception as error:  # libraries of formats have no common family of errors
        if isinstance(error, CyxjaxError | MemoryError):
            raise
        why = " ".join(str(error).split())[:300]
        raise kind(f"{path}: cannot be read ({type(error).__name__}: {why}). HINT: {hint}.") from error


def read_json_lines(path: str | os.PathLike[str], max_bytes: int | None = None) -> list[dict[str, Any]]:
    """The JSON objects that the lines of a file hold; [] without a file. A line cut by a crash is skipped.

    Raises: OSError, as `read_plain` does, for a file that exists.
    """
    found = []
    raw = read_plain(path, max_bytes) if os.path.exists(path) else b""
    for line in raw.decode("utf-8", "replace").splitlines():
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict):
                found.append(value)
    return found


def _refuse_mode(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected a plain file", str(path))


def sync(path: str | os.PathLike[str]) -> None:
    """Makes the bytes of a file, or the names in a folder, survive a power cut, where the file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(fd)


def try_flock(fd: int, *, shared: bool = False) -> bool:
    """Takes the kernel's lock on `fd`, until it is closed; False if another process holds it, or if the file
    system has no locks.

    shared: together with others that share it.
    """
    with suppress(OSError):
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


def scaled(count: float, unit: str) -> str:
    """`23.9 MB`, in powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.1f} {prefix}{unit}" if prefix else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} P{unit}"


# YAML 1.1 reads 1e-3 (no dot) as text; typed fields are coerced by pydantic, open ones by this.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def scientific(value: Any) -> Any:
    """A copy of `value` with texts such as "1e-3" as numbers, at any depth of mappings and lists."""
    if isinstance(value, Mapping):
        return {key: scientific(one) for key, one in value.items()}
    if isinstance(value, list):
        return [scientific(one) for one in value]
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


def dotted(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings; an empty one is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
