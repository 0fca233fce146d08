"""The position of each rank in its stream: noted after every step, stored in checkpoints and restored."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cyxjax.distributed.agreement import PATIENCE_S, agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError
from cyxjax.train.hooks.hook import Position, RunState, SavingHook

_META = "stream_places"
_KEPT = 1024  # more than the steps that are running or read ahead


class StreamPosition(NamedTuple):
    """The samples of the epoch up to a step, and the loader's own place after it."""

    samples: int
    place: Any


class StreamPositions(SavingHook):
    """Positions of this rank's loader: after each step since the start, or from the checkpoint it resumes.

    For a loader it is a hook of the run, on all ranks, which exchange their places whenever the run is saved.
    Comes before the hook that saves.
    """

    def __init__(self) -> None:
        self.shared = False  # all ranks read one stream: one place is valid for any number of ranks
        self._noted: dict[tuple[int, int], StreamPosition] = {}  # by (epoch, step in it)
        self._stored: dict[str, Any] = {}  # what the newest save gathered, or the checkpoint held

    def begin(self, group: ProcessGroup, shared: bool, goes_on: bool) -> None:
        """Begins a new fit; its streams start over, unless it continues from restored positions."""
        self._group, self.shared = group, shared
        if not goes_on:
            self._noted, self._stored = {}, {}

    def note(self, epoch: int, step: int, samples: int, place: Any) -> None:
        """Notes the loader's place after `step` steps of `epoch`."""
        if place is not None:
            self._noted[epoch, step] = StreamPosition(samples, place)
            if len(self._noted) > _KEPT:
                del self._noted[next(iter(self._noted))]

    def before(self, position: Position) -> StreamPosition | None:
        """The last position in the current epoch that is not after `position`."""
        here = position.epoch, position.step_in_epoch
        last = max((at for at in self._noted if at[0] == position.epoch and at <= here), default=None)
        return None if last is None else self._noted[last]

    def on_state(self, moment: RunState) -> None:
        """Collects all ranks' places at this moment, to be stored."""
        position = moment.position
        noted = self._noted.get((position.epoch, position.step_in_epoch))
        place = None if noted is None else noted.place
        places = agree(self._group, "the places of streams", note=place, timeout_s=PATIENCE_S)
        at = [position.epoch, position.step_in_epoch, position.samples]
        known = noted is not None and all(place is not None for place in places)
        self._stored = {"at": at, "shared": self.shared, "ranks": places} if known else {}

    def meta(self, position: Position) -> dict[str, Any]:
        """The metadata for a checkpoint of `position`; {} if no place is known."""
        at = [position.epoch, position.step_in_epoch, position.samples]
        return {_META: self._stored} if self._stored.get("at") == at else {}

    def restore(self, meta: Mapping[str, Any], rank: int) -> None:
        """Takes the places of a checkpoint; a fit that reads a stream then calls `check_world_size`."""
        self._noted, self._stored = {}, meta.get(_META) or {}
        if self._stored:
            (epoch, step, samples), ranks = self._stored["at"], self._stored["ranks"]
            place = ranks[0 if self._stored["shared"] else rank % len(ranks)]
            self._noted = {(epoch, step): StreamPosition(samples, place)}

    def check_world_size(self, world_size: int) -> None:
        """Raises: CheckpointError if the places taken from a checkpoint are for another world size."""
        ranks = self._stored.get("ranks", ())
        if ranks and not self._stored["shared"] and len(ranks) != world_size:
            raise CheckpointError(
                f"the checkpoint holds the places of {len(ranks)} ranks in streams of their own; this run "
                f"has {world_size}, and they cannot be divided again. HINT: resume with {len(ranks)} "
                "processes; a stream that all ranks share (cx.data.Rows) can be divided."
            )
