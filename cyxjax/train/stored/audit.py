"""Whether every sample came once an epoch, in its place, through all restarts of a run; if not, where not."""

from pathlib import Path
from typing import NamedTuple

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.data.audit import Finding, Step, audit, ended, walk
from cyxjax.data.ledger import Ledger
from cyxjax.data.ledger_file import Entry, read_entries, taken_back
from cyxjax.errors import CheckpointError, DataError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.run_folder import RunFolder
from cyxjax.train.resume import place_of


class Verdict(NamedTuple):
    """What an audit found: nothing wrong if there are no findings."""

    findings: list[Finding]
    notes: list[str]  # what is as it should be, but not plain
    summary: str


def entries_of(run: RunFolder) -> list[Entry]:
    """What a run recorded. Raises: DataError for a folder without a ledger, or with one that is not ours."""
    if not run.ledger.is_file():
        raise DataError(
            f"{run.ledger} does not exist. HINT: name the run_dir of an experiment; loaders keep no ledger."
        )
    entries = read_entries(run.ledger)
    if not entries:
        raise DataError(f"{run.root}: no step was recorded yet. HINT: audit after the first save.")
    return entries


def examine(run: RunFolder, entries: list[Entry], max_findings: int = 10) -> Verdict:
    """The verdict on a run that recorded `entries`."""
    findings, steps = audit(entries, max_findings=max_findings), list(walk(entries))
    findings += _of_checkpoints(run.checkpoints, steps)
    spans = _rolled_back(run.checkpoints, steps)
    notes = [
        f"steps {first} to {stop - 1}: left out on purpose: a rollback took back what they had changed"
        for first, stop in spans
    ]
    again = len(entries) - len(steps) + taken_back(run.ledger)
    return Verdict(findings, notes, _summary(steps, again, len(findings), spans))


def _of_checkpoints(folder: Path, steps: list[Step]) -> list[Finding]:
    """Checkpoints whose ledger is not the one recorded at their step, or of steps nobody recorded."""
    recorded = {step.entry.ledger.steps: step.entry for step in steps}
    end, findings = steps[-1], []
    saved = list_steps(folder) if folder.is_dir() else []
    for step in saved:
        try:
            meta = read_manifest(step_folder(folder, step)).meta
        except CheckpointError:
            continue  # `cyxjax checkpoint verify` tells of damage; what is damaged is not resumed from
        found = Ledger.from_json(meta["ledger"]) if "ledger" in meta else None
        if found is not None and recorded.get(found.steps, Entry(end.entry.facts, found)).ledger != found:
            text = f"the checkpoint of step {step} has another ledger"
            findings.append(Finding(found.steps - 1, "chain", text))
        if step == saved[-1]:
            findings += _behind(step, meta, found, end)
    return findings


def _behind(step: int, meta: dict, found: Ledger | None, end: Step) -> list[Finding]:
    """What the newest checkpoint was trained on beyond the end of the record."""
    last = end.entry.ledger
    if found is None:
        text = f"the checkpoint of step {step} has no ledger: what it was trained on was not recorded"
        return [Finding(last.steps, "behind", text)]
    if found.steps > last.steps:
        text = f"the record ends {found.steps - last.steps} steps before the checkpoint of step {step}"
        return [Finding(last.steps, "behind", text)]
    place = place_of(meta)
    if found != last or place.epoch < last.epoch:
        return []  # the record goes on after the checkpoint: the run was cut short
    at = (last.epoch, end.stop)
    if (place.epoch, place.samples) == at or (place.epoch > last.epoch and ended(end.entry.facts, end.stop)):
        return []
    text = (
        f"the checkpoint of step {step} stands after {place.samples} samples of epoch {place.epoch}, "
        f"the record after {at[1]} of epoch {at[0]}"
    )
    return [Finding(last.steps, "behind", text)]


def _rolled_back(folder: Path, steps: list[Step]) -> list[tuple[int, int]]:
    """(first, one past the last) recorded step of each rollback that the newest checkpoint knows of.

    A rollback that no checkpoint followed is undone by a resume, which trains on those samples again.
    """
    newest = max(list_steps(folder), default=None) if folder.is_dir() else None
    if newest is None:
        return []
    history = DistributedTrainingHistory.from_dict(
        read_manifest(step_folder(folder, newest)).meta.get("history", {})
    )
    # Of before samples were counted: batches, all of one size.
    size = steps[0].entry.facts.global_batch_size
    older = len(history.rollback_batches) - len(history.rollback_samples)
    samples = [batch * size for batch in history.rollback_batches[:older]] + history.rollback_samples
    at = {(step.entry.ledger.epoch, step.stop): step.entry.ledger.steps for step in steps}
    stops = [at.get(place, 0) for place in zip(history.rollback_epochs, samples, strict=True)]
    return [(stop - n, stop) for stop, n in zip(stops, history.rollback_steps, strict=True) if stop >= n]


def _summary(steps: list[Step], again: int, num_findings: int, spans: list[tuple[int, int]]) -> str:
    end, last = steps[-1], steps[-1].entry.ledger
    whole = ended(end.entry.facts, end.stop)
    place = (
        f"{last.epoch + 1} epochs and 0 samples count"
        if whole
        else f"{last.epoch} epochs and {end.stop:,} samples count"
    )
    redone = f", {again} of them made again after a restart" if again else ""
    verdict = (
        "every sample came once an epoch, in its place" if not num_findings else f"{num_findings} findings"
    )
    if spans:
        verdict += f"; {sum(stop - first for first, stop in spans)} steps left out on purpose"
    return (
        f"{len(steps) + again} steps{redone}; {place}, {last.samples:,} of a set of "
        f"{end.entry.facts.num_samples:,}, digest {last.digest[:16]}: {verdict}"
    )
