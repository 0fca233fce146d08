"""The checkpoints in a folder, opened by all ranks to save or to restore."""

import itertools
from pathlib import Path
from typing import Any

from cyxjax.checkpoint.checkpointer import Checkpointer, Checkpoints, NullCheckpointer
from cyxjax.checkpoint.manifest import Manifest
from cyxjax.checkpoint.store import Best
from cyxjax.checkpoint.writers import ALONE, Writers
from cyxjax.distributed.agreement import PEER_WORK_S, agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.launch.heartbeat import report_progress
from cyxjax.train.settings import SavePolicy

_opened = itertools.count()  # equal on all ranks, for all open together


def newest_in(
    folder: Path, group: ProcessGroup, *, wanted: bool = True, known: Manifest | None = None
) -> Manifest | None:
    """The newest good checkpoint in `folder`; None if no rank wants or sees one. All ranks call it.

    wanted: whether this rank asks for it. known: one that was found before, whose files are not read again.
    Raises: CheckpointError if all are damaged.
    """
    if not any(agree(group, "looking for a folder of checkpoints", note=wanted and folder.is_dir())):
        return None
    report_progress(-1, "checkpoint")
    newest = restorer(folder, group, known=known).newest_manifest()
    report_progress(-1, "idle")
    return newest


def restorer(
    folder: Path, group: ProcessGroup, *, saves: bool = False, known: Manifest | None = None
) -> Checkpointer:
    """The checkpoints that all ranks restore; nothing in `folder` is changed unless the run saves there.

    known: what `newest_in` found.
    """
    is_writer = group.topology.is_master and saves
    return Checkpointer(folder, is_writer=is_writer, writers=_writers(group, "talk"), known=known)


def checkpointer_for(saving: SavePolicy, group: ProcessGroup, best: Best = "min") -> Checkpoints:
    """The checkpoints of a run, kept as `saving` says; a `NullCheckpointer` if it keeps none.

    best: whether low or high values of its monitor are the best.
    """
    if not saving.saves:
        return NullCheckpointer()
    return open_checkpoints(
        saving.folder,
        group,
        keep_last=saving.keep_last,
        keep_best=saving.keep_best,
        best=best,
        async_save=saving.in_background,
    )


def open_checkpoints(
    folder: str | Path, group: ProcessGroup, *, together: bool = True, **options: Any
) -> Checkpointer:
    """The checkpoints in `folder`; every rank opens them, and one writes all but the others' shares.

    together: False if rank 0 may open them alone, to save a state that it holds completely.
    """
    # A channel of their own: they write while the loop and its hooks communicate.
    writers = _writers(group, f"save/{next(_opened)}") if together else ALONE
    return Checkpointer(folder, is_writer=group.topology.is_master, writers=writers, **options)


def _writers(group: ProcessGroup, channel: str) -> Writers:
    def exchange(what: str, note: Any) -> list[Any]:
        return agree(group, what, note=note, timeout_s=PEER_WORK_S, channel=channel)

    return Writers(group.topology.rank, exchange)
