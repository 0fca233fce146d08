"""What the feed delivered, as the run's ledger: in every checkpoint, and a line a step in `ledger.jsonl`.

The feed notes the ids that were really read and the places they stand for (a list append a step); sums are
made many steps at a time, and the ranks' shares are added up only where all ranks meet anyway, at saves.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyxjax.data.audit import StreamPlan
from cyxjax.data.batches import HostBatch
from cyxjax.data.ledger import Fingerprint, Ledger, StreamFacts, fingerprints
from cyxjax.files import append
from cyxjax.observe.records import or_told
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.loop import Hook, Position, RunState

FILE = "ledger.jsonl"
_AT_ONCE = 64  # steps summed together: 2 us a step, where one alone costs 15
_SETTLE_EVERY = 4096  # steps, for runs that save seldom: bounds what is held in memory
_LOW = 2**32 - 1


class Tape:
    """The (epoch, fingerprint) of each step delivered to this process since the last `take`."""

    def __init__(self, facts: StreamFacts | None = None) -> None:
        self.facts = facts  # None: a source without ids, of which nothing can be recorded
        self._fresh: list[tuple[int, HostBatch]] = []
        self._summed: list[tuple[int, Fingerprint]] = []

    def note(self, epoch: int, host: HostBatch) -> None:
        """One more step was delivered."""
        if self.facts is None:
            return
        # Inputs and targets are let go: only the numbers of the samples are kept.
        self._fresh.append((epoch, host._replace(inputs=None, targets=None)))
        if len(self._fresh) >= _AT_ONCE:
            self._sum()

    def take(self) -> list[tuple[int, Fingerprint]]:
        """All that was noted since the last call, oldest first."""
        self._sum()
        taken, self._summed = self._summed, []
        return taken

    def put_back(self, taken: list[tuple[int, Fingerprint]]) -> None:
        """As if `taken` had not been taken."""
        self._summed = [*taken, *self._summed]

    def _sum(self) -> None:
        if self._fresh:
            hosts = [host for _, host in self._fresh]
            places, ids = np.stack([h.places for h in hosts]), np.stack([np.asarray(h.ids) for h in hosts])
            real = np.stack([h.weight for h in hosts]) > 0
            epochs = [epoch for epoch, _ in self._fresh]
            self._summed += zip(epochs, fingerprints(places, ids, real), strict=True)
            self._fresh = []


class LedgerHook(Hook):
    """Keeps the ledger of a run. Stands before the hook that saves, and sees every moment that is saved."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._ledger: Ledger | None = None  # None: this run's samples are not all known
        self._step = -1  # optimizer steps done when it was last brought up to date
        self._saving: Callable[[Position, bool], bool] = Hook().wants_state
        self._path: Path | None = None
        self._unwritten = ""  # what a full disk did not take; it is tried again with the next lines

    def open(self) -> Tape:
        """An empty tape for the next run."""
        self.tape = Tape()
        return self.tape

    def restore(self, meta: dict[str, Any]) -> None:
        """Goes on from a checkpoint. One without a ledger is no error: nothing is recorded then."""
        found = meta.get("ledger")
        self._ledger = Ledger.from_json(found) if found is not None else None
        self._step = int(meta["position"]["step"])

    def meta(self, moment: RunState) -> dict[str, Any]:
        """What a checkpoint of `moment` holds of the ledger; nothing if it is not up to date."""
        current = self._ledger is not None and self._step == moment.position.step
        return {"ledger": self._ledger.to_json()} if current and self._ledger is not None else {}

    def begin(self, saving: Callable[[Position, bool], bool], path: Path | None) -> "LedgerHook":
        """Records into `path` (None: nowhere but the checkpoints), brought up to date whenever `saving`."""
        self._saving, self._path = saving, path
        return self

    def on_start(self, moment: RunState) -> None:
        noted = self.tape.take()
        new = moment.position[1:] == (0, 0)  # epoch and step in it
        if new:
            self._ledger, self._step = Ledger(), moment.position.step
        facts = self.tape.facts
        if self._ledger is None or facts is None:
            self._ledger = None
            return
        # After a rollback the bad step counts as consumed, those already sent off after it do not.
        plan = StreamPlan(facts.num_samples, facts.global_batch_size, facts.drop_last)
        ahead = (
            plan.steps_per_epoch * moment.position.epoch + moment.position.step_in_epoch - self._ledger.steps
        )
        if not 0 <= ahead <= len(noted):
            self._ledger = None
            return
        self.tape.put_back(noted[:ahead])
        if ahead:
            self._step = -1  # its next number was settled before: not up to date until it is again
        else:
            self._write([facts._asdict()], anew=new)

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        return self._ledger is not None and (
            self._saving(position, asked_to_save) or position.step % _SETTLE_EVERY == 0
        )

    def on_state(self, moment: RunState) -> None:
        self._settle(moment.position)

    def on_end(self, moment: RunState, finished: bool) -> None:
        self._settle(moment.position)

    def _settle(self, position: Position) -> None:
        if self._ledger is None:
            return
        lines = []
        for epoch, batch in _of_all_ranks(self.tape.take()):
            self._ledger = self._ledger.extend(epoch, batch)
            lines.append(self._ledger.to_json())
        self._step = position.step
        self._write(lines)

    def _write(self, lines: list[dict[str, Any]], anew: bool = False) -> None:
        if self._path is None or not lines:
            return
        text = "" if anew else self._unwritten
        self._unwritten = text + "".join(json.dumps(line) + "\n" for line in lines)
        with or_told(self._path, warn_on_stderr):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(self._path, self._unwritten.encode(), anew=anew)
            self._unwritten = ""


def _of_all_ranks(mine: list[tuple[int, Fingerprint]]) -> list[tuple[int, Fingerprint]]:
    """The shares of all ranks, step by step, added up; every rank calls it after the same steps."""
    if jax.process_count() == 1 or not mine:
        return mine
    # 64-bit numbers cross as two halves: jax cuts them to 32 bits otherwise.
    words = [
        [f.num_samples, f.placed >> 32, f.placed & _LOW, f.unplaced >> 32, f.unplaced & _LOW] for _, f in mine
    ]
    ranks = multihost_utils.process_allgather(np.array(words, np.uint32))
    return [(mine[i][0], _added(ranks[:, i])) for i in range(len(mine))]


def _added(words: np.ndarray) -> Fingerprint:
    total = Fingerprint()
    for n, a, b, c, d in words.tolist():
        total += Fingerprint(n, a << 32 | b, c << 32 | d)
    return total
