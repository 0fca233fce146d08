"""The position of each rank in its stream: gathered for a checkpoint, and restored from it."""

from collections.abc import Mapping
from typing import Any

from cyxjax.distributed import process_group
from cyxjax.distributed.agreement import PEER_WORK_S, agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.hooks.hook import Position, RunState, SavingHook

_META = "stream_places"


class StreamPositions(SavingHook):
    """The places of all ranks' loaders, as the newest save gathered them or a checkpoint held them.

    For a loader it is a hook of the run, on all ranks, which exchange their places whenever the run is saved.
    Comes before the hook that saves.
    """

    def __init__(self) -> None:
        self._stored: dict[str, Any] = {}

    def begin(self, group: ProcessGroup, shared: bool, goes_on: bool) -> None:
        """Begins a new fit; its streams start over, unless it continues from restored positions.

        shared: whether all ranks read one stream, of which one place is valid for any number of ranks.
        """
        self._group, self._shared = group, shared
        if not goes_on:
            self._stored = {}

    def on_state(self, moment: RunState) -> None:
        """Collects all ranks' places at this moment, to be stored."""
        position = moment.position
        places = agree(self._group, "the places of streams", note=position.place, timeout_s=PEER_WORK_S)
        at = [position.epoch, position.step_in_epoch, position.samples]
        known = all(place is not None for place in places)
        ranks = places if known else [None] * len(places)
        self._stored = {"at": at, "shared": self._shared, "ranks": ranks}

    def meta(self, position: Position) -> dict[str, Any]:
        """The metadata for a checkpoint of `position`; {} without a stream."""
        at = [position.epoch, position.step_in_epoch, position.samples]
        return {_META: self._stored} if self._stored.get("at") == at else {}

    def restore(self, meta: Mapping[str, Any], position: Position, rank: int) -> Position:
        """`position` of a checkpoint with the place of `rank`, if it holds one; a fit that reads a stream
        then calls `check_world_size`.
        """
        self._stored = meta.get(_META) or {}
        if not self._stored:
            return position
        ranks = self._stored["ranks"]
        return position._replace(place=ranks[0 if self._stored["shared"] else rank % len(ranks)])

    def check_world_size(self, world_size: int, consumed: int) -> None:
        """Prints a warning if the checkpoint is of another world size, and `consumed` samples are skipped.

        Raises: CheckpointError if it is, and holds the places of the ranks.
        """
        ranks = self._stored.get("ranks", ())
        if not ranks or self._stored["shared"] or len(ranks) == world_size:
            return
        if ranks[0] is not None:
            raise CheckpointError(
                f"the checkpoint holds the places of {len(ranks)} ranks in streams of their own; this run "
                f"has {world_size}, and they cannot be divided again. HINT: resume with {len(ranks)} "
                "processes; a stream that all ranks share (cx.data.Rows) can be divided."
            )
        if consumed and process_group.is_master():
            warn_on_stderr(
                f"WARNING: {consumed} samples of the loader were consumed by {len(ranks)} processes, and are "
                f"skipped by {world_size}. Samples are lost or used twice unless the loaders together begin "
                "with the same samples, as those with a DistributedSampler do. HINT: resume with "
                f"{len(ranks)} processes, or give fit a dataset."
            )
