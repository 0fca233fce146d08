"""Audits a run: whether each sample was used exactly once per epoch through all its restarts."""

from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.data.ledger import BEGINNING, Finding, Place, Stretch, Tally, audit, walk
from cyxjax.data.ledger_file import Kept, read_ledger
from cyxjax.errors import CheckpointError, DataError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import counted
from cyxjax.run_folder import RunFolder
from cyxjax.train.resume import position_of


class Verdict(NamedTuple):
    """What an audit found: nothing wrong if there are no findings."""

    findings: list[Finding]
    notes: list[str]  # correct, but worth an explanation
    summary: str


def records_of(run: RunFolder) -> tuple[dict[int, dict], Kept]:
    """Returns (the metadata of each checkpoint by its step, what the run recorded).

    The checkpoints are read first: during a run, its record is ahead of them, never behind.
    Raises: DataError for a folder without a record, or with one that cyxjax did not write.
    """
    saved = _readable(run.checkpoints)
    kept = read_ledger(run.ledger) if run.ledger.is_file() else None
    if kept is None or not kept.records:
        raise DataError(
            f"{run.ledger}: no step was recorded. HINT: name the run_dir of an experiment, after its first "
            "save; loaders keep no ledger."
        )
    return saved, kept


def num_samples(kept: Kept) -> int:
    """Samples that a run recorded."""
    return sum(record.span.found.samples for record in kept.records)


def examine(saved: dict[int, dict], kept: Kept, max_findings: int = 10) -> Verdict:
    """The verdict on a run with the checkpoints `saved` that recorded `kept`."""
    recorded = kept.records, kept.begins, kept.was
    findings, spans = audit(*recorded, max_findings=max_findings), list(walk(*recorded))
    findings += _of_checkpoints(saved, spans)
    left_out = _rolled_back(saved, spans, kept.begins)
    notes = [
        f"steps {first} to {last}: left out on purpose: a rollback undid their changes"
        for first, last in left_out
    ]
    return Verdict(findings, notes, _summary(spans, kept, len(findings), left_out))


def _readable(folder: Path) -> dict[int, dict]:
    """The metadata of each checkpoint by its step, in order. Damaged ones are left out: they are not
    restored, and `cyxjax checkpoint verify` names them.
    """
    found = {}
    for step in list_steps(folder):
        with suppress(CheckpointError):
            found[step] = read_manifest(step_folder(folder, step)).meta
    return found


def _of_checkpoints(saved: dict[int, dict], spans: list[Stretch]) -> list[Finding]:
    """Checkpoints trained on different samples than recorded up to their step, or on unrecorded steps."""
    recorded = {one.after.steps: one for one in spans}
    end, findings = spans[-1], []
    for step, meta in saved.items():
        found = Tally.from_json(meta["ledger"]) if "ledger" in meta else None
        at = recorded.get(found.steps) if found is not None else None
        if found is not None and at is not None and not at.after.same(found):
            text = f"the checkpoint of step {step} was trained on other samples than those recorded up to it"
            findings.append(Finding(at.before.steps + 1, "altered", text))
        if step == max(saved):
            findings += _behind(step, meta, found, end)
    return findings


def _behind(step: int, meta: dict, found: Tally | None, end: Stretch) -> list[Finding]:
    """Findings about what the newest checkpoint was trained on beyond the end of the record."""
    last, (facts, span) = end.after, end.record
    if found is None:
        text = f"the checkpoint of step {step} has no ledger: the samples it was trained on were not recorded"
        return [Finding(last.steps, "behind", text)]
    if found.steps > last.steps:
        text = f"the record ends {found.steps - last.steps} steps before the checkpoint of step {step}"
        return [Finding(last.steps, "behind", text)]
    place = position_of(meta)
    if not found.same(last) or place.epoch < span.epoch:
        return []  # the record continues after the checkpoint: the run was interrupted
    at = (span.epoch, span.stop)
    if (place.epoch, place.samples) == at or (place.epoch > span.epoch and facts.ended(span.stop)):
        return []
    text = (
        f"the checkpoint of step {step} is after {place.samples} samples of epoch {place.epoch + 1}, "
        f"the record after {at[1]} of epoch {at[0] + 1}"
    )
    return [Finding(last.steps, "behind", text)]


def _rolled_back(saved: dict[int, dict], spans: list[Stretch], begins: Place) -> list[tuple[int, int]]:
    """(first, last) step undone by each rollback that the newest checkpoint records; spans end at rollbacks.
    Steps are numbered as on the console, where a later step reuses the number of a step that was undone.

    A rollback without a later checkpoint is undone by a resume, which trains on those samples again.
    """
    if not saved:
        return []
    meta = saved[max(saved)]
    history = DistributedTrainingHistory.from_dict(meta.get("history", {}))
    at = {(one.record.span.epoch, one.record.span.stop): one.after.steps for one in spans}
    places = zip(history.rollback_epochs, history.rollback_samples, strict=True)
    # Those of the run that a loaded state is from are not part of this record.
    rollbacks = zip(places, history.rollback_steps, strict=False)
    mine = [(at.get(place, 0), n) for place, n in rollbacks if place > begins]
    undone = [n for _, n in mine]
    before = position_of(meta).step + sum(undone) - meta["ledger"]["steps"] if "ledger" in meta else 0
    lost = accumulate(undone, initial=0)  # steps undone before each rollback
    return [
        (before + stop - earlier - n + 1, before + stop - earlier)
        for (stop, n), earlier in zip(mine, lost, strict=False)
        if stop >= n
    ]


def _summary(spans: list[Stretch], kept: Kept, num_findings: int, left_out: list[tuple[int, int]]) -> str:
    (facts, span), last = spans[-1].record, spans[-1].after
    again, (epoch, samples) = kept.taken_back, kept.begins
    whole = facts.ended(span.stop)
    place = (
        f"{counted(span.epoch + 1, 'epoch')} of {facts.num_samples:,} samples"
        if whole
        else f"{counted(span.epoch, 'epoch')} and {span.stop:,} of {facts.num_samples:,} samples"
    )
    redone = f", {again} of them repeated after a restart" if again else ""
    verdict = "every sample came once per epoch"
    verdict += ", but those that drop_last leaves out" if facts.drop_last else ""
    verdict = counted(num_findings, "finding") if num_findings else verdict
    if kept.begins != BEGINNING:
        verdict += (
            f" from sample {samples:,} of epoch {epoch + 1} on, where a state of another run was loaded"
        )
    if left_out:
        verdict += (
            f"; {counted(sum(last - first + 1 for first, last in left_out), 'step')} left out on purpose"
        )
    return (
        f"{verdict}: {place}, {last.samples:,} in all; {counted(last.steps + again, 'step')}{redone} in "
        f"{counted(len(spans), 'span')}, sum {last.total:016x}"
    )
