"""Compiled programs on disk, so that the next start compiles nothing: one folder of the user's, bounded.

jax keeps programs too, but only those of rank 0, and a reader may find a half-written file. Here every
rank writes its own (its devices are part of a program's key), each file whole and with the sha256 of what it
holds. What is loaded is executed, so the folder must belong to this user and be closed to others.
"""

import functools
import hashlib
import os
import platform
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cyxjax.files import PRIVATE, text_in, write_whole
from cyxjax.launch import output
from cyxjax.launch.backend import jax_private

AUTO, OFF = "auto", "off"
VARIABLE = "CYXJAX_COMPILE_CACHE"
MAX_BYTES = 1 << 30
_DIGEST = 32  # bytes of the sha256 that a file begins with: of the key's line and the program
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
    jax_private.keep_programs(ProgramStore(folder, facts, output.log if tell else lambda line: None))


def find_folder(asked: str, env: Mapping[str, str], jaxs_own: str | None) -> Path | None:
    """Where programs are kept; None: nowhere, or (a folder that is a URL) where jax itself keeps them.

    The first of these that is set: `asked` (unless auto), CYXJAX_COMPILE_CACHE, `jaxs_own`
    (JAX_COMPILATION_CACHE_DIR), XDG_CACHE_HOME, ~/.cache.
    """
    word = asked if asked != AUTO else env.get(VARIABLE) or AUTO
    chosen = word if word != AUTO else jaxs_own
    if word in (OFF, "") or (chosen and "://" in chosen):
        return None
    return (Path(chosen).expanduser() if chosen else _users_cache(env)) / "cyxjax" / "programs"


def _users_cache(env: Mapping[str, str]) -> Path:
    named = Path(env.get("XDG_CACHE_HOME", ""))
    # the standard says to ignore a relative path
    return named if named.is_absolute() else Path("~/.cache").expanduser()


class ProgramStore:
    """The store in which jax looks for a program before it compiles one (`get`), and keeps new ones (`put`).

    facts: what must be the same when a program is used again, besides jax's key. Nothing here raises: a file
    that is damaged, or cannot be read, counts as missing.
    """

    def __init__(
        self, folder: Path, facts: str, say: Callable[[str], None], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path = folder  # under this name jax shows it
        self._facts, self._say, self._max_bytes = facts, say, max_bytes
        self._writes = True
        # Bytes that may be written before this process lists the folder, which takes long if it is full. The
        # first number is random, so that only a few of many short runs list it.
        self._room = secrets.randbelow(max_bytes // 8)

    def get(self, key: str) -> bytes | None:
        """The program kept as `key`; None if there is none that is whole."""
        if not self._is_usable:
            return None
        path, line = self._place(key)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return None  # from a time when others could write here, or from a folder put in its place
                data = file.read()
        except OSError:
            return None
        if data[:_DIGEST] != _sha256(line + data[_DIGEST:]):
            return None
        with suppress(OSError):
            os.utime(path)
        return data[_DIGEST:]

    def put(self, key: str, value: bytes) -> None:
        """Keeps `value` as `key`. A full or read-only disk is reported once and not used again."""
        if not (self._is_usable and self._writes):
            return
        path, line = self._place(key)
        try:
            self._make_room(_DIGEST + len(value))
            write_whole(path, _sha256(line + value) + value, mode=PRIVATE, synced=False)
        except OSError as error:
            self._stop(str(error))

    def _place(self, key: str) -> tuple[Path, bytes]:
        """(path, line of what the program was compiled for)."""
        line = f"{key} {self._facts}\n".encode()
        return self._path / f"{hashlib.sha256(line).hexdigest()}.program", line

    @functools.cached_property
    def _is_usable(self) -> bool:
        """Whether there is a folder that only this user can use. It is made at its first use."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self._path.mkdir(mode=0o700)
            found = os.lstat(self._path)
        except OSError as error:
            return self._stop(str(error))
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return is_own or self._stop(f"{self._path} is not a folder that only this user can use (mode 0700)")

    def _stop(self, reason: str) -> bool:
        self._writes = False
        self._say(f"compiled programs are not kept for the next start: {reason}. {_HINT}")
        return False

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the files that were used longest ago, where all would take more than `max_bytes`."""
        self._room -= num_bytes
        if self._room >= 0:
            return
        files = []
        for path in self._path.iterdir():
            with suppress(OSError):  # another process has just removed it
                found = path.lstat()
                files.append((found.st_mtime, found.st_size, path))
        # Other processes may write at the same time; each looks again after an eighth of what is allowed.
        self._room = self._max_bytes // 8
        left = sum(size for _, size, _ in files) + num_bytes + self._room
        for _, size, path in sorted(files):
            if left > self._max_bytes:
                path.unlink(missing_ok=True)
                left -= size


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@functools.cache
def _processor() -> str:
    """What machine code depends on: architecture and the processor's features, as a digest."""
    words = [platform.machine(), platform.processor()]
    same = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    first = text_in("/proc/cpuinfo").partition("\n\n")[0]
    words += [line for line in first.splitlines() if line.startswith(same)]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
