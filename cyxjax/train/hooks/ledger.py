"""Records the delivered samples: a sum in every checkpoint, one line per span in `ledger.jsonl`.

The feed notes the ids that were actually read and their places in the order (one list append per step); sums
are computed for many steps at a time. At a save, where all ranks synchronize anyway, the steps since the last
save become a span (one per epoch), and the ranks' shares of it are summed.
"""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

from cyxjax.data import ledger_file
from cyxjax.data.ledger import BEGINNING, Delivered, Place, Span, StreamFacts, Tally
from cyxjax.distributed.agreement import PEER_WORK_S, agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.files import append
from cyxjax.observe.records import warn_if_unwritten
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.hooks.hook import Position, RunState, SavingHook, Tape


class LedgerHook(SavingHook):
    """Keeps the ledger of a run. Comes before the hook that saves, and sees every state that is saved.

    If it cannot continue the ledger of a checkpoint, it starts a new one.
    """

    every = 4096  # for runs that save seldom: bounds what is held in memory

    def __init__(self) -> None:
        self.tape = Tape()  # of the newest plan
        self._tally = Tally()
        self._begins = BEGINNING  # where the record begins: after a load from elsewhere, at that state
        self._at: tuple[int, int] | None = (0, 0)  # (epoch, samples) of `_tally`; None: not known
        self._was: StreamFacts | None = None  # of the checkpoint that the run resumes from
        self._unwritten = ""  # lines that could not be written to a full disk; retried with the next lines

    def restore(self, meta: dict[str, Any], position: Position) -> None:
        """Continues the ledger of a checkpoint at `position`."""
        found, facts = meta.get("ledger"), meta.get("stream")
        self._tally = Tally.from_json(found) if found is not None else Tally()
        self._begins = Place(*found.get("begins", ())) if found is not None else BEGINNING
        self._at = (position.epoch, position.samples) if found is not None else None
        self._was = StreamFacts(**facts) if facts is not None else None

    def meta(self, moment: RunState) -> dict[str, Any]:
        """The metadata to store in a checkpoint of `moment`, without the ledger if it is not up to date."""
        if self.tape.facts is None:
            return {}
        current = self._at == (moment.position.epoch, moment.position.samples)
        begins = {} if self._begins == BEGINNING else {"begins": list(self._begins)}
        found = {"ledger": self._tally.to_json() | begins} if current else {}
        return found | {"stream": self.tape.facts._asdict()}

    def begin(
        self,
        group: ProcessGroup,
        path: Path | None,
        say: Callable[[str], None],
        *,
        resumed: bool,
        starts_over: bool,
    ) -> "LedgerHook":
        """Begins a fit, and records it into `path` (None: only into the checkpoints).

        resumed: whether it continues from what was restored. starts_over: whether that was recorded
        elsewhere, so that a new record begins at its place.
        """
        self._group, self._path, self._say, self._starts_over = group, path, say, starts_over
        self._resumed, self._unwritten = resumed, ""
        return self

    def on_start(self, moment: RunState) -> None:
        facts, place = self.tape.facts, (moment.position.epoch, moment.position.samples)
        if facts is None:
            self._at = None
        elif self._resumed:
            self._resume(facts, place)
        elif place == (0, 0):
            self._new(facts, BEGINNING)
        else:  # after a rollback: the bad step counts as consumed, later steps already dispatched do not
            self._settle(moment.position)
        self.tape.clear()
        self._resumed = False

    def on_state(self, moment: RunState) -> None:
        self._settle(moment.position)

    def _new(self, facts: StreamFacts, begins: Place) -> None:
        self._tally, self._begins, self._at = Tally(), begins, begins
        if self._path is not None:
            ledger_file.refuse_link(self._path)
            with warn_if_unwritten(self._path, self._say):
                ledger_file.begin(self._path)
        self._write([ledger_file.first_line(facts, begins)])

    def _resume(self, facts: StreamFacts, place: tuple[int, int]) -> None:
        epoch, samples = place
        if samples and self._was and not self._was.same_order(facts):
            self._say(
                f"WARNING: the order of samples changed after {samples} samples of epoch {epoch + 1}: some "
                "of that epoch are used twice and some never. HINT: resume with the same data, seed and "
                "shuffle."
            )
        taken_back = 0
        if self._starts_over:
            self._new(self._was or facts, Place(*place))
        elif self._at is None:
            self._tally, self._at = Tally(), place  # `cyxjax audit` reports what is not recorded
        elif self._path is not None:
            with warn_if_unwritten(self._path, self._say):
                cut = ledger_file.cut_back(self._path, self._tally, place, self._was or facts, self._begins)
                taken_back = cut.taken_back
                if self._tally.total is None:  # a checkpoint of version 0.2.0
                    self._tally = self._tally._replace(total=cut.total)
                if cut.made_again:
                    self._say(
                        f"WARNING: {self._path} had lost {cut.made_again} steps before the checkpoint; they "
                        "were written again and agree with the sum in the checkpoint."
                    )
                if cut.missing:
                    self._say(
                        f"WARNING: {self._path} has lost {cut.missing} steps before the checkpoint, which "
                        "cannot be verified. HINT: run `cyxjax audit` to list them."
                    )
        self._write([facts._asdict() | ({"taken_back": taken_back} if taken_back else {})])

    def _settle(self, position: Position) -> None:
        self._at = (position.epoch, position.samples)
        spans = _of_all_ranks(self._group, _spans(self.tape.take(self._at)))
        for span in spans:
            self._tally = self._tally.plus(span)
        self._write([span.to_json() for span in spans])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        self._unwritten += "".join(map(ledger_file.line, lines))
        with warn_if_unwritten(self._path, warn_on_stderr):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            append(self._path, self._unwritten.encode())
            self._unwritten = ""


def _spans(steps: list[Span]) -> list[Span]:
    """Merges steps that follow each other within an epoch into one span each."""
    spans: list[Span] = []
    for step in steps:
        if spans and spans[-1][:3:2] == step[:2]:  # (epoch, stop), (epoch, first)
            epoch, first, _, count, found = spans.pop()
            step = Span(epoch, first, step.stop, count + 1, found.plus(step.found))
        spans.append(step)
    return spans


def _of_all_ranks(group: ProcessGroup, mine: list[Span]) -> list[Span]:
    """Sums the shares of all ranks, span by span; every rank calls it after the same steps."""
    if not mine:
        return mine
    ranks = agree(group, "the ledger", note=[span.found for span in mine], timeout_s=PEER_WORK_S)
    shares = ([Delivered(*found) for found in of_span] for of_span in zip(*ranks, strict=True))
    return [
        span._replace(found=reduce(Delivered.plus, found)) for span, found in zip(mine, shares, strict=True)
    ]
