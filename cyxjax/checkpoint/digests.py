"""Whether the files of a step are the ones its manifest lists, byte for byte."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from cyxjax.checkpoint.manifest import MANIFEST, FileEntry, read_manifest
from cyxjax.errors import CheckpointError


def find_problems(folder: Path, step: int, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Everything wrong with the step in `folder`; [] if exactly its files are there, each with its digest.

    share: (i, n): of the files' contents those of every n-th are read, from the i-th on.
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
        return [str(error).partition(" HINT:")[0]]


def describe_files(folder: Path) -> tuple[FileEntry, ...]:
    """An entry for every file below `folder`; each is made private (0600), fsynced and read back."""
    return tuple(describe_file(folder, path) for path in list_files(folder))


def describe_file(folder: Path, path: str) -> FileEntry:
    """The entry of the file `path` below `folder`, made private, fsynced and read back."""
    os.chmod(folder / path, 0o600)
    return FileEntry(path, (folder / path).stat().st_size, _sha256(folder / path, sync=True))


def list_files(folder: Path) -> list[str]:
    """Paths of the plain files below `folder`, relative and sorted.

    Raises: CheckpointError for a symlink or a special file: a checkpoint has neither.
    """
    return sorted(path.relative_to(folder).as_posix() for path in _walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
                else:
                    raise CheckpointError(
                        f"{entry.path!r} is a link or special file. HINT: remove it; a checkpoint has none."
                    )


def _file_problem(entry: FileEntry, path: Path | None, *, is_read: bool) -> str:
    if path is None:
        return f"{entry.path} is missing"
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        return f"{entry.path} has {num_bytes} bytes, not {entry.num_bytes}"
    if not is_read:
        return ""
    return (
        "" if _sha256(path) == entry.sha256 else f"{entry.path} has another sha256: its content was altered"
    )


def _sha256(path: Path, *, sync: bool = False) -> str:
    # O_NOFOLLOW: a link put in place between listing and reading is an error, not a way out of the folder.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if sync:
            os.fsync(fd)
        return hashlib.file_digest(file, "sha256").hexdigest()
