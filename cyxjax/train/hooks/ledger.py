"""What the feed delivered, as the run's ledger: in every checkpoint, and a line a step in `ledger.jsonl`.

The feed notes the ids that were really read and the places they stand for (a list append a step); sums are
made many steps at a time, and the ranks' shares are added up only where all ranks meet anyway, at saves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from cyxjax.data import ledger_file
from cyxjax.data.batches import HostBatch
from cyxjax.data.ledger import Fingerprint, Ledger, StreamFacts, fingerprints
from cyxjax.files import append
from cyxjax.observe.records import or_told
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.loop import Hook, Position, RunState

_AT_ONCE = 64  # steps summed together: 2 us a step, where one alone costs 15
_SETTLE_EVERY = 4096  # steps, for runs that save seldom: bounds what is held in memory
_LOW = 2**32 - 1


class Noted(NamedTuple):
    """One step that was delivered: the places [first, stop) of its epoch, and what stood there."""

    epoch: int
    first: int
    stop: int
    batch: Fingerprint  # of this rank's share


class Tape:
    """The steps delivered to this process since the last `take`."""

    def __init__(self, facts: StreamFacts | None = None) -> None:
        self.marks: Any = None  # of a stream: where each rank stands in it (feeding.places)
        self.facts = facts  # None: a source without ids, of which nothing can be recorded
        self._fresh: list[tuple[int, int, int, Any, Any, Any]] = []
        self._summed: list[Noted] = []

    def note(self, epoch: int, host: HostBatch) -> None:
        """One more step was delivered."""
        if self.facts is None:
            return
        # Inputs and targets are let go: only the numbers of the samples are kept.
        self._fresh.append((epoch, host.stop - host.total, host.stop, host.places, host.ids, host.weight))
        if len(self._fresh) >= _AT_ONCE:
            self._sum()

    def take(self) -> list[Noted]:
        """All that was noted since the last call, oldest first."""
        self._sum()
        taken, self._summed = self._summed, []
        return taken

    def put_back(self, taken: list[Noted]) -> None:
        """As if `taken` had not been taken."""
        self._summed = [*taken, *self._summed]

    def _sum(self) -> None:
        if self._fresh:
            epochs, firsts, stops, *rows = zip(*self._fresh, strict=True)
            places, ids, weight = map(np.stack, rows)
            sums = fingerprints(places, ids, weight > 0)
            self._summed += map(Noted, epochs, firsts, stops, sums)
            self._fresh = []


class LedgerHook(Hook):
    """Keeps the ledger of a run. Stands before the hook that saves, and sees every moment that is saved.

    It never ends in silence: where it cannot go on from what a checkpoint says, it begins anew and says so.
    """

    def __init__(self) -> None:
        self.tape = Tape()
        self._ledger = Ledger()
        self._at: tuple[int, int] | None = (0, 0)  # (epoch, samples) of `_ledger`; None: not known
        self._was: StreamFacts | None = None  # of the checkpoint the run goes on from
        self._resumed = False
        self._saving: Callable[[Position, bool], bool] = Hook().wants_state
        self._path: Path | None = None
        self._say: Callable[[str], None] = warn_on_stderr
        self._unwritten = ""  # what a full disk did not take; it is tried again with the next lines

    def open(self) -> Tape:
        """An empty tape for the next run."""
        self.tape = Tape()
        return self.tape

    def restore(self, meta: dict[str, Any], position: Position) -> None:
        """Goes on from a checkpoint of `position`."""
        found, facts = meta.get("ledger"), meta.get("stream")
        self._ledger = Ledger.from_json(found) if found is not None else Ledger()
        self._at = (position.epoch, position.samples) if found is not None else None
        self._was = StreamFacts(**facts) if facts is not None else None
        self._resumed = True

    def meta(self, moment: RunState) -> dict[str, Any]:
        """What a checkpoint of `moment` holds of the ledger; no ledger if it is not up to date."""
        if self.tape.facts is None:
            return {}
        current = self._at == (moment.position.epoch, moment.position.samples)
        found = {"ledger": self._ledger.to_json()} if current else {}
        return found | {"stream": self.tape.facts._asdict()}

    def begin(
        self, saving: Callable[[Position, bool], bool], path: Path | None, say: Callable[[str], None]
    ) -> "LedgerHook":
        """Records into `path` (None: nowhere but the checkpoints), brought up to date whenever `saving`."""
        self._saving, self._path, self._say = saving, path, say
        return self

    def on_start(self, moment: RunState) -> None:
        noted, facts = self.tape.take(), self.tape.facts
        place = (moment.position.epoch, moment.position.samples)
        if facts is None:
            self._say_lost()
            return
        if self._resumed:
            self._resumed = False
            self._resume(facts, place)
        elif place == (0, 0):
            self._new(facts)
        else:
            self._after_rollback(noted, place)

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        return self.tape.facts is not None and (
            self._saving(position, asked_to_save) or position.step % _SETTLE_EVERY == 0
        )

    def on_state(self, moment: RunState) -> None:
        self._settle(moment.position)

    def on_end(self, moment: RunState, finished: bool) -> None:
        self._settle(moment.position)

    def _say_lost(self) -> None:
        if self._resumed and self._at not in (None, (0, 0)):
            self._say(
                "WARNING: this run kept a ledger of its samples, and now reads a loader, whose samples have "
                "no numbers: the ledger ends here. HINT: give fit a dataset or arrays."
            )
        self._resumed, self._at = False, None

    def _new(self, facts: StreamFacts) -> None:
        self._ledger, self._at, self._unwritten = Ledger(), (0, 0), ""
        if self._path is not None:
            ledger_file.refuse_link(self._path)
            with or_told(self._path, self._say):
                ledger_file.begin(self._path)
        self._write([facts._asdict()])

    def _resume(self, facts: StreamFacts, place: tuple[int, int]) -> None:
        epoch, samples = place
        for change in self._was.changes(facts) if self._was else []:
            self._say(f"Resumed with other samples or steps: {change}.")
        if samples and self._was and not self._was.same_order(facts):
            self._say(
                f"WARNING: the order of samples changed after {samples} samples of epoch {epoch}: some of "
                "that epoch come twice, some never. HINT: resume with the data, seed and shuffle of before."
            )
        taken_back = 0
        if self._at is None:
            self._ledger, self._at = Ledger(), place
            self._say(
                f"WARNING: the checkpoint has no ledger: what was consumed before sample {samples} of epoch "
                f"{epoch} cannot be proved; recorded from here on. HINT: `cyxjax audit` will say so."
            )
        elif self._path is not None:
            with or_told(self._path, self._say):
                cut = ledger_file.cut_back(self._path, self._ledger, self._was or facts)
                self._say_cut(cut)
                taken_back = cut.taken_back
        self._write([facts._asdict() | ({"taken_back": taken_back} if taken_back else {})])

    def _say_cut(self, cut: ledger_file.Cut) -> None:
        if cut.made_again:
            self._say(
                f"WARNING: {self._path} had lost its last {cut.made_again} steps"
                f"{' (it was torn)' * cut.torn}; they were "
                "written again and agree with the digest of the checkpoint."
            )
        if cut.missing:
            self._say(
                f"WARNING: {self._path} has lost its last {cut.missing} steps before the checkpoint, and "
                "they cannot be proved. HINT: `cyxjax audit` will name them."
            )

    def _after_rollback(self, noted: list[Noted], place: tuple[int, int]) -> None:
        """The bad step counts as consumed, those already sent off after it do not."""
        consumed = [step for step in noted if (step.epoch, step.stop) <= place]
        self.tape.put_back(consumed)
        if consumed:
            self._at = None  # not up to date until it is settled

    def _settle(self, position: Position) -> None:
        if self.tape.facts is None:
            return
        place = (position.epoch, position.samples)
        noted = self.tape.take()
        due = [step for step in noted if (step.epoch, step.stop) <= place]
        self.tape.put_back(noted[len(due) :])
        lines = []
        for step, batch in zip(due, _of_all_ranks([step.batch for step in due]), strict=True):
            self._ledger = self._ledger.extend(step.epoch, batch, step.first)
            if self._path is not None:
                lines.append(self._ledger.to_json())
        self._at = place
        self._write(lines)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        self._unwritten += "".join(map(ledger_file.line, lines))
        with or_told(self._path, warn_on_stderr):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(self._path, self._unwritten.encode())
            self._unwritten = ""


def _of_all_ranks(mine: list[Fingerprint]) -> list[Fingerprint]:
    """The shares of all ranks, step by step, added up; every rank calls it after the same steps."""
    if jax.process_count() == 1 or not mine:
        return mine
    # 64-bit numbers cross as two halves: jax cuts them to 32 bits otherwise.
    words = [
        [f.num_samples, f.placed >> 32, f.placed & _LOW, f.unplaced >> 32, f.unplaced & _LOW] for f in mine
    ]
    ranks = multihost_utils.process_allgather(np.array(words, np.uint32))
    return [_added(ranks[:, i]) for i in range(len(mine))]


def _added(words: np.ndarray) -> Fingerprint:
    total = Fingerprint()
    for n, a, b, c, d in words.tolist():
        total += Fingerprint(n, a << 32 | b, c << 32 | d)
    return total
