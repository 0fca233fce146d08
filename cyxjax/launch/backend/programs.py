"""Compiled programs on disk, so that the next start compiles nothing: one folder of the user's, bounded.

jax keeps programs too, but of rank 0 alone, and a reader may meet a file that is half written. Here every
rank writes its own (its devices are part of a program's key), each file whole and with the sha256 of what it
holds. What is loaded is executed, so folder and files must belong to this user and be closed to others.
"""

import functools
import hashlib
import os
import platform
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cyxjax.errors import ConfigError
from cyxjax.files import PRIVATE, write_whole
from cyxjax.launch.backend import jax_private

AUTO, OFF = "auto", "off"
VARIABLE = "CYXJAX_COMPILE_CACHE"
MAX_BYTES = 1 << 30
_MAGIC = b"cyxjax program 1\n"
_HEAD = len(_MAGIC) + 64  # then the key's line and the program, which the 64 hex digits are the sha256 of
_DRAFT_S = 3600  # a draft older than this was left by a process that was killed
_USED_S = 3600  # how exactly the time of the last use is kept
_HINT = f"HINT: set {VARIABLE} to a folder of your own, or to {OFF}."


def keep(asked: bool | str = AUTO, env: Mapping[str, str] = os.environ, *, tell: bool = True) -> None:
    """Keeps what is compiled from now on in the folder that `find_folder` gives, or (`off`) no longer.

    tell: whether a line on standard error says, once, why programs are not kept.
    """
    folder = find_folder(str(asked), env, jax_private.program_folder())
    if folder is None:
        jax_private.keep_programs(None)
        return
    facts = f"{_processor()} NPROC={env.get('NPROC', '')}"  # neither is part of jax's key on CPU
    jax_private.keep_programs(ProgramStore(folder, facts, _on_stderr if tell else lambda line: None))


def find_folder(asked: str, env: Mapping[str, str], jaxs_own: str | None) -> Path | None:
    """Where programs are kept; None: nowhere, or (a folder that is a URL) where jax itself keeps them.

    The first that says something: `asked` (unless auto), CYXJAX_COMPILE_CACHE, `jaxs_own`
    (JAX_COMPILATION_CACHE_DIR), XDG_CACHE_HOME, ~/.cache.
    """
    word = asked if asked != AUTO else env.get(VARIABLE) or AUTO
    if word == OFF:
        return None
    chosen = word if word != AUTO else jaxs_own
    if chosen and "://" in chosen:
        if word == AUTO:
            return None
        raise ConfigError(f"{chosen} keeps no compiled programs: a folder on this host is needed. {_HINT}")
    return (Path(chosen).expanduser() if chosen else _users_cache(env)) / "cyxjax" / "programs"


def _users_cache(env: Mapping[str, str]) -> Path:
    said = Path(env.get("XDG_CACHE_HOME", ""))
    return said if said.is_absolute() else Path("~/.cache").expanduser()  # a relative one is to be ignored


class ProgramStore:
    """What jax asks for a compiled program before it compiles, and hands it to afterwards (`get`, `put`).

    facts: what must be the same when a program is used again, besides jax's key. Nothing here raises: what
    cannot be read, is damaged, or was written by another user is not there.
    """

    def __init__(
        self, folder: Path, facts: str, say: Callable[[str], None], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path = folder  # under this name jax shows it
        self._facts, self._say, self._max_bytes = facts, say, max_bytes
        self._trusted: bool | None = None
        self._writes = True
        self._room = 0  # bytes that may be written before the folder is looked at again

    def get(self, key: str) -> bytes | None:
        """The program kept as `key`; None if there is none that is whole and this user's own."""
        if not self._is_private(make=False):
            return None
        name = self._line(key)
        path = self._file(name)
        try:
            data = _read_own(path)
        except OSError:
            return None
        rest = data[_HEAD:]
        if data[:_HEAD] != _MAGIC + _hex(rest) or not rest.startswith(name):
            return None
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _USED_S:
                os.utime(path)
        return rest[len(name) :]

    def put(self, key: str, value: bytes) -> None:
        """Keeps `value` as `key`. A full or read-only disk is reported once and not used again."""
        if not self._writes or not self._is_private(make=True):
            return
        rest = (name := self._line(key)) + value
        try:
            self._make_room(len(rest) + _HEAD)
            write_whole(self._file(name), _MAGIC + _hex(rest) + rest, mode=PRIVATE, synced=False)
        except OSError as error:
            self._stop(str(error))

    def _line(self, key: str) -> bytes:
        return f"{key} {self._facts}\n".encode()

    def _file(self, line: bytes) -> Path:
        return self._path / f"{hashlib.sha256(line).hexdigest()}.program"

    def _is_private(self, make: bool) -> bool:
        """Whether the folder is this user's alone. One that is missing is made, where `make` says so."""
        if self._trusted is None:
            try:
                if make:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    with suppress(FileExistsError):
                        self._path.mkdir(mode=0o700)
                found = os.lstat(self._path)
            except FileNotFoundError:
                return False
            except OSError as error:
                self._trusted = False
                self._stop(str(error))
            else:
                self._trusted = stat.S_ISDIR(found.st_mode) and _is_own(found, 0o077)
                if not self._trusted:
                    self._stop(f"{self._path} is not a folder of this user's alone (mode 0700)")
        return bool(self._trusted)

    def _stop(self, reason: str) -> None:
        if self._writes:
            self._writes = False
            self._say(f"compiled programs are not kept for the next start: {reason}. {_HINT}")

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the files that were used longest ago, where all would take more than `max_bytes`."""
        self._room -= num_bytes
        if self._room >= 0:
            return
        files = []
        for entry in os.scandir(self._path):
            with suppress(OSError):  # another process has just removed it
                found = entry.stat(follow_symlinks=False)
                files.append((found.st_mtime, found.st_size, entry))
        left = sum(size for _, size, _ in files)
        # So many processes may write at once; each looks again after an eighth of what is allowed.
        share = self._max_bytes // 8
        for used, size, entry in sorted(files, key=lambda file: file[0]):
            is_draft = entry.name.endswith(".tmp") and used < time.time() - _DRAFT_S
            if is_draft or (left + num_bytes + share > self._max_bytes and entry.name.endswith(".program")):
                with suppress(OSError):
                    os.unlink(entry)
                left -= size
        self._room = share


def _hex(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _read_own(path: Path) -> bytes:
    """The bytes of a plain file that only this user can write. Raises: OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not _is_own(found, 0o022):
            raise PermissionError(f"{path} is not a file that only this user can write")
        return file.read()


def _is_own(found: os.stat_result, closed: int) -> bool:
    if not hasattr(os, "geteuid"):  # Windows: the user's profile is closed to others by itself
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & closed


@functools.cache
def _processor() -> str:
    """What machine code depends on: architecture and the processor's features, as a digest."""
    words = [platform.machine(), platform.processor()]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
        same = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
        words += [line for line in first.splitlines() if line.startswith(same)]
    return _hex("\n".join(words).encode()).decode()[:16]


def _on_stderr(line: str) -> None:
    print(f"cyxjax: {line}", file=sys.stderr)
