"""`cyxjax audit RUN`: whether every sample came once an epoch, in its place; and if not, where not."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.command import Parser
from cyxjax.data.audit import Finding, StreamPlan, audit, surviving
from cyxjax.data.ledger import Ledger, StreamFacts, read_records
from cyxjax.data.order import Order
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR, DataError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.hooks.ledger import FILE


def main(argv: Sequence[str] | None = None) -> int:
    """Audits one run folder; the exit code: 0, or 1 with a line for each thing that is wrong.

    Raises: DataError for a folder without a ledger, or with one that is not ours.
    """
    given = _parser().parse_args(argv)
    facts, records = read_records(_ledger_of(given.run))
    if not records:
        raise DataError(f"{given.run}: no step was recorded yet. HINT: audit after the first save.")
    findings = audit(records, _order(facts), _plan(facts), max_findings=given.max_findings)
    findings += _of_checkpoints(given.run / "checkpoints", records)
    for finding in findings:
        print(finding)
    spans = _rolled_back(given.run / "checkpoints", _plan(facts))
    for first, stop in spans:
        print(f"steps {first} to {stop - 1}: left out on purpose: a rollback took back what they had changed")
    print(_summary(facts, surviving(records), len(records), len(findings), spans))
    return EXIT_USER_ERROR if findings else EXIT_OK


def _parser() -> Parser:
    parser = Parser(prog="cyxjax audit", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help=f"a run folder, in which {FILE} lies")
    parser.add_argument("--max-findings", type=int, default=10, metavar="N", help="stop after so many")
    return parser


def _ledger_of(run: Path) -> Path:
    path = Path(os.path.abspath(run)) / FILE
    if not path.is_file():
        raise DataError(
            f"{path} does not exist. HINT: name the run_dir of an experiment; loaders keep no ledger."
        )
    return path


def _plan(facts: StreamFacts) -> StreamPlan:
    return StreamPlan(facts.num_samples, facts.global_batch_size, facts.drop_last)


def _order(facts: StreamFacts) -> Callable[[int, int, int], np.ndarray]:
    def order(epoch: int, first: int, stop: int) -> np.ndarray:
        return Order(facts.num_samples, facts.seed, epoch, facts.shuffle)[first:stop]

    return order


def _of_checkpoints(folder: Path, records: list[Ledger]) -> list[Finding]:
    """Checkpoints whose ledger is not the one that was recorded at their step."""
    recorded = {record.steps: record for record in surviving(records)}
    findings = []
    for step in list_steps(folder) if folder.is_dir() else []:
        raw = read_manifest(step_folder(folder, step)).meta.get("ledger")
        found = Ledger.from_json(raw) if raw is not None else None
        if found is not None and recorded.get(found.steps, found) != found:
            findings.append(
                Finding(found.steps - 1, "chain", f"the checkpoint of step {step} has another ledger")
            )
    return findings


def _rolled_back(folder: Path, plan: StreamPlan) -> list[tuple[int, int]]:
    """(first, one past the last) step in the data of each rollback that the newest checkpoint knows of.

    A rollback that no checkpoint followed is undone by a resume, which trains on those samples again.
    """
    newest = max(list_steps(folder), default=None) if folder.is_dir() else None
    if newest is None:
        return []
    history = DistributedTrainingHistory.from_dict(
        read_manifest(step_folder(folder, newest)).meta.get("history", {})
    )
    stops = [
        epoch * plan.steps_per_epoch + batch
        for epoch, batch in zip(history.rollback_epochs, history.rollback_batches, strict=True)
    ]
    return [(stop - steps, stop) for stop, steps in zip(stops, history.rollback_steps, strict=True)]


def _summary(
    facts: StreamFacts, kept: list[Ledger], written: int, num_findings: int, spans: list[tuple[int, int]]
) -> str:
    epochs, rest = divmod(kept[-1].steps, _plan(facts).steps_per_epoch)
    again = f", {written - len(kept)} of them made again after a restart" if written > len(kept) else ""
    verdict = (
        "every sample came once an epoch, in its place" if not num_findings else f"{num_findings} findings"
    )
    if spans:
        verdict += f"; {sum(stop - first for first, stop in spans)} steps left out on purpose"
    return (
        f"{written} steps{again}; {epochs} epochs and {rest} steps count, {kept[-1].samples:,} samples of "
        f"{facts.num_samples:,}, digest {kept[-1].digest[:16]}: {verdict}"
    )
