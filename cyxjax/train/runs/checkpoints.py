"""The checkpoints in a folder, opened by all ranks to save or to restore."""

import itertools
from pathlib import Path
from typing import Any

from cyxjax.checkpoint.checkpointer import Checkpointer, Checkpoints, NullCheckpointer
from cyxjax.checkpoint.store import Best
from cyxjax.checkpoint.writers import ALONE, Writers
from cyxjax.distributed.agreement import PATIENCE_S, agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.train.settings import SavePolicy

_opened = itertools.count()  # equal on all ranks, for all open together


def restorer_for(folder: str | Path, group: ProcessGroup, *, saves: bool = False) -> Checkpointer | None:
    """The checkpoints all ranks go on from, None where none of them sees the folder; all ranks call it.

    saves: whether the run keeps checkpoints there; else nothing in it is changed.
    """
    if not any(agree(group, "looking for a folder of checkpoints", note=Path(folder).is_dir())):
        return None
    return Checkpointer(folder, is_writer=group.topology.is_master and saves, writers=_writers(group, "talk"))


def checkpointer_for(saving: SavePolicy, group: ProcessGroup, best: Best = "min") -> Checkpoints:
    """The checkpoints of a run, kept as `saving` says: off, if that is none.

    best: which values of its monitor are.
    """
    if not saving.saves:
        return NullCheckpointer()
    kept: dict[str, Any] = {"keep_last": saving.keep_last, "keep_best": saving.keep_best, "best": best}
    kept["async_save"] = saving.in_background
    return open_checkpoints(saving.folder, group, **kept)


def open_checkpoints(
    folder: str | Path, group: ProcessGroup, *, together: bool = True, **options: Any
) -> Checkpointer:
    """The checkpoints in `folder`; every rank opens them, one writes but for the others' shares.

    together: False where the first rank may be the only one that opens them, to save what it holds whole.
    """
    # A channel of these alone: they write while the loop and its hooks talk.
    writers = _writers(group, f"save/{next(_opened)}") if together else ALONE
    return Checkpointer(folder, is_writer=group.topology.is_master, writers=writers, **options)


def _writers(group: ProcessGroup, channel: str) -> Writers:
    def exchange(what: str, note: Any) -> list[Any]:
        return agree(group, what, note=note, timeout_s=PATIENCE_S, channel=channel)

    return Writers(group.topology.rank, exchange)
