"""A folder of steps on disk: names, leftovers of crashes, and the one rename that makes a step exist.

`step_00000123` is a step. The suffix `.tmp-<run>-<pid>` means that it is being written; `.old-...`, replaced;
`.corrupt-<time>`, that it did not verify; `.abandoned-<time>`, that the run was rewound to before it;
`.earlier-<time>`, that it is from a previous run in the same folder, and cyxjax never deletes it.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from cyxjax.errors import CheckpointError
from cyxjax.files import sync, try_flock

ARRAYS = "arrays"
_STEP = re.compile(r"step_(\d{8,18})")
_LEFTOVER = re.compile(r"(step_\d{8,18})\.(tmp|old)-[0-9a-f]+-\d+")
_ASIDE = re.compile(r"step_\d{8,18}\.(corrupt|abandoned|earlier)-([0-9-]+)")


def step_folder(directory: Path, step: int) -> Path:
    """The folder of `step`."""
    return directory / f"step_{step:08d}"


def list_steps(directory: Path) -> list[int]:
    """Numbers of all step folders, oldest first, verified or not. Other names are ignored.

    Raises: CheckpointError for a step that is a symlink: its target may be anywhere and change at any time.
    """
    steps = []
    for entry in _entries(directory):
        match = _STEP.fullmatch(entry.name)
        if entry.is_symlink() and entry.name.startswith("step_"):
            raise CheckpointError(
                f"{entry.path} is a symbolic link; checkpoints are plain folders. "
                "HINT: remove the link or copy its target here."
            )
        # The name must be the one we would give: step_0000000000123 would be a second folder of step 123.
        if match and entry.is_dir() and step_folder(directory, int(match[1])).name == entry.name:
            steps.append(int(match[1]))
    return sorted(steps)


def list_aside(directory: Path, why: str) -> list[str]:
    """Names of the steps that were set aside: "corrupt", "abandoned" or "earlier", as their names say."""
    found = [match for entry in _entries(directory) if (match := _ASIDE.fullmatch(entry.name))]
    return [match[0] for match in found if match[1] == why]


def remove_aside(directory: Path, keep_corrupt: int) -> list[str]:
    """Deletes what was set aside, except the `keep_corrupt` latest damaged steps; returns their names."""
    corrupt = sorted(list_aside(directory, "corrupt"), key=lambda name: name.partition(".corrupt-")[2])
    gone = sorted(corrupt[: max(len(corrupt) - keep_corrupt, 0)])
    gone += list_aside(directory, "abandoned")
    for name in gone:
        shutil.rmtree(directory / name)
    return gone


def prepare(directory: Path) -> None:
    """Creates `directory` (0700) if needed, and removes what a killed writer left in it.

    Raises: CheckpointError with the path, like `make_private` and `list_steps`.
    """
    make_private(directory)
    list_steps(directory)
    for entry in _entries(directory):
        match = _LEFTOVER.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            _clean_leftover(Path(entry.path), directory / match[1], match[2])


def make_private(directory: Path) -> None:
    """Creates `directory` (0700) if it does not exist. Raises: CheckpointError if it cannot be written."""
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{directory} cannot be created or written. HINT: name a folder that you can write to."
        )


def refuse_swapped(directory: Path, known: os.stat_result) -> None:
    """Raises: CheckpointError if a different folder, or a link to one, has replaced `directory`."""
    if directory.exists() and not os.path.samestat(directory.stat(), known):
        what = f"a link to {os.path.realpath(directory)}" if directory.is_symlink() else "another folder"
        raise CheckpointError(
            f"{directory} is {what} since this run began; nothing is written there. "
            "HINT: restore the original folder."
        )


@contextmanager
def writing(directory: Path, step: int, owner: str) -> Iterator[Path]:
    """A private folder to write `step` into: renamed to the step if the block succeeds, else removed.

    owner: `<run>-<pid>`, so that no two writers have the same folder.
    """
    final = step_folder(directory, step)
    folder = final.with_name(f"{final.name}.tmp-{owner}")
    folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try_flock(fd)  # while it is held, other processes know that the writer is alive
    try:
        yield folder
        for root, _, _ in os.walk(folder):
            sync(root)
        _publish(folder, final, owner)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(fd)


def set_aside(directory: Path, step: int, why: str) -> Path:
    """New path of the folder of `step`, renamed to `<name>.<why>-<time>`, so that it is no longer a step."""
    folder = step_folder(directory, step)
    aside = folder.with_name(f"{folder.name}.{why}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
    folder.rename(aside)
    sync(directory)
    return aside


def remove(directory: Path, step: int, owner: str) -> None:
    """Deletes `step`. It is renamed first, so that an interrupted deletion leaves no incomplete step."""
    folder = step_folder(directory, step)
    doomed = folder.with_name(f"{folder.name}.tmp-{owner}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _entries(directory: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def _publish(folder: Path, final: Path, owner: str) -> None:
    """Renames `folder` to `final`; an existing step is kept beside it until the new one is in place.

    Raises: OSError if `final` exists and is not a folder.
    """
    old = final.with_name(f"{final.name}.old-{owner}")
    if final.is_dir():
        final.rename(old)
    folder.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clean_leftover(path: Path, final: Path, kind: str) -> None:
    if kind == "old" and not final.exists():
        path.rename(final)  # killed between the two renames of a replacement
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    is_free = try_flock(fd)
    os.close(fd)
    if not is_free:  # its writer is alive
        return
    shutil.rmtree(path)
