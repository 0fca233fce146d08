"""A step that one or several processes write, each its shares; it exists completely or not at all.

open: the first process creates the private folder -> each process writes its own file, leaf by leaf, and a
note about its contents -> publish: the first process joins the notes to the manifest and renames the folder.
After each of these phases all processes receive all failures, so that all continue or all give up. The notes
are files because an exchange sends all of them to every process: 11 MB for 2,000 leaves of 64 processes.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cyxjax.checkpoint.arrays import Entry, write_file
from cyxjax.checkpoint.folders import ARRAYS
from cyxjax.checkpoint.manifest import Leaf, Piece, describe_file, dtype_name, file_of
from cyxjax.checkpoint.tree import is_share
from cyxjax.errors import CheckpointError, DamagedStep
from cyxjax.files import PRIVATE, read_plain, write_whole

Exchange: TypeAlias = Callable[[str, Any], list[Any]]
"""(name of the action, JSON value of this process) -> values of all processes, in order; all call it."""
Note: TypeAlias = dict[str, Any]
"""file: the entry of a process's file; crc32 of each array in it; pieces: start and stop of its shares."""
_NOTES = "notes"  # folder of the notes, beside the arrays until the manifest contains them


class Writers(NamedTuple):
    """The processes that save together, from the view of one of them; the first is the writer."""

    rank: int
    exchange: Exchange

    def all_do(self, what: str, do: Callable[[], Any]) -> list[Any]:
        """The results of `do` on all processes.

        Raises on all of them if it raised on one: there its own error; on the others an error that names the
        process, a DamagedStep if a step was found damaged, else a CheckpointError.
        """
        cause: Exception | None = None
        note: dict[str, Any]
        try:
            note = {"done": do()}
        except Exception as error:  # storage raises any error; the other processes wait for a note
            text, is_damage = f"{type(error).__name__}: {str(error)[:300]}", isinstance(error, DamagedStep)
            cause, note = error, {"failed": text, "is_damage": is_damage}
        notes = self.exchange(what, note)
        failed = [f"process {rank}: {note['failed']}" for rank, note in enumerate(notes) if "failed" in note]
        is_damage = any(note.get("is_damage") for note in notes)
        if cause is not None and isinstance(cause, DamagedStep) == is_damage:
            raise cause
        if failed:
            kind = DamagedStep if is_damage else CheckpointError
            raise kind(f"{what} failed, {'; '.join(failed[:3])}") from cause
        return [note["done"] for note in notes]


ALONE = Writers(0, lambda what, note: [note])


def is_spread(leaves: Mapping[str, Any]) -> bool:
    """Whether a process holds only a share of some leaf; the same on all processes."""
    return any(is_share(leaf) and not leaf.is_whole for leaf in leaves.values())


def write_together(
    directory: Path,
    leaves: Mapping[str, Any],
    writers: Writers,
    writing: Callable[[], AbstractContextManager[Path]],
    commit: Callable[[Path, list[Note]], None],
) -> None:
    """Writes one step below `directory`, on all processes together, each holding one leaf at a time.

    writing: creates the private folder, whose name all receive, and publishes it on exit. commit: writes the
    manifest into it. Both are called only by the first process.
    Raises: on every process if one failed; then nothing of the step remains.
    """
    with ExitStack() as opened:

        def open_folder() -> str:
            if writers.rank:
                return ""
            folder = opened.enter_context(writing())
            (folder / ARRAYS).mkdir(mode=0o700)
            (folder / _NOTES).mkdir(mode=0o700)
            return folder.name

        def share() -> None:
            note = json.dumps(write_share(folder, leaves, writers.rank))
            # Not synced: the manifest replaces the notes before the step exists.
            write_whole(_note_of(folder, writers.rank), note, mode=PRIVATE, synced=False)

        def publish() -> None:
            if not writers.rank:
                notes = notes_in(folder, len(names))
                shutil.rmtree(folder / _NOTES)
                commit(folder, notes)
                opened.close()

        names = writers.all_do("opening a step", open_folder)
        folder = directory / names[0]
        writers.all_do("writing a share", share)
        writers.all_do("publishing a step", publish)


def write_share(folder: Path, leaves: Mapping[str, Any], rank: int) -> Note:
    """Writes the file of one process and returns its note. The first process writes whole leaves."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: created by the first process, not seen here. HINT: name a folder all hosts share."
        )
    # A leaf without elements has no share: it is written whole.
    cut = {
        name: leaf
        for name, leaf in leaves.items()
        if is_share(leaf) and not leaf.is_whole and 0 not in leaf.shape
    }
    own = {name: leaf for name, leaf in cut.items() if leaf.start < leaf.stop}
    entries = {
        name: Entry((leaf.stop - leaf.start,), np.dtype(leaf.dtype), leaf.values)
        for name, leaf in own.items()
    }
    if not rank:
        entries |= {name: Entry.of(leaf) for name, leaf in leaves.items() if name not in cut}
    crc32 = write_file(folder / ARRAYS / file_of(rank), entries, {"format": "np"})
    file = describe_file(folder, f"{ARRAYS}/{file_of(rank)}")
    pieces = {name: (leaf.start, leaf.stop) for name, leaf in own.items()}
    return {"file": vars(file), "crc32": crc32, "pieces": pieces}


def leaves_of(leaves: Mapping[str, Any], notes: list[Note]) -> tuple[Leaf, ...]:
    """`leaves` as they were written, according to the notes of all processes."""

    def leaf_of(name: str, leaf: Any) -> Leaf:
        held = [(rank, note) for rank, note in enumerate(notes) if name in note["pieces"]]
        pieces = tuple(Piece(rank, *(*note["pieces"][name], note["crc32"][name])) for rank, note in held)
        crc32 = 0 if pieces else notes[0]["crc32"][name]
        return Leaf(name, tuple(leaf.shape), dtype_name(leaf.dtype), crc32, pieces)

    return tuple(leaf_of(name, leaf) for name, leaf in leaves.items())


def notes_in(folder: Path, num_processes: int) -> list[Note]:
    """What each process wrote into `folder`, by rank."""
    return [json.loads(read_plain(_note_of(folder, rank))) for rank in range(num_processes)]


def _note_of(folder: Path, rank: int) -> Path:
    return folder / _NOTES / f"{rank:05d}.json"
