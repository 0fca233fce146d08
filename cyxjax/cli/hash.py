"""`cyxjax hash RUN [RUN]`: digests of a run's checkpoints, or where those of two runs first differ."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.restoring import open_step
from cyxjax.cli.checkpoint import run_of
from cyxjax.command import Parser, existing_folder
from cyxjax.config.compared import differing_values
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR, CheckpointError
from cyxjax.observe.lines import counted
from cyxjax.observe.state_digests import contradicted_leaves, read_digests
from cyxjax.run_folder import RunFolder

# The parts of a history that depend only on the numbers: no times, no counts of processes.
_CURVES = (
    *("train_losses", "train_accuracies", "val_losses", "val_accuracies", "learning_rates", "metrics"),
    *("epochs", "val_epochs", "grad_norms", "grad_norm_epochs"),
    *("rollback_epochs", "rollback_samples", "rollback_batches", "rollback_steps"),
)
_SHOWN = 12  # digits of a digest on the screen


class StepBits(NamedTuple):
    """One checkpoint, as digests."""

    leaves: dict[str, str]  # by name, such as params/Dense_0/kernel
    history: str
    exact: dict[str, str]  # what the bits depend on, as recorded by an exact run
    config: dict[str, Any]

    @property
    def digest(self) -> str:
        return _sha256(self.leaves)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints digests; returns the exit code: 0, or 1 if two runs differ.

    Raises: CheckpointError for a run without checkpoints, or two without a common step.
    """
    given = _parser().parse_args(argv)
    if given.other is None:
        found = as_json(_run_in(given.run), given.all)
        print(json.dumps(found) if given.json else "\n".join(_lines(found["steps"])))
        return EXIT_OK
    lines, equal = compare(_run_in(given.run), _run_in(given.other))
    print(json.dumps({"equal": equal, "said": lines}) if given.json else "\n".join(lines))
    return EXIT_OK if equal else EXIT_USER_ERROR


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax hash", description=__doc__, epilog="example: cyxjax hash runs/on-2-hosts runs/on-8-hosts"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "run", type=existing_folder, metavar="RUN", help="a run folder or its checkpoints folder"
    )
    parser.add_argument(
        "other", type=existing_folder, nargs="?", metavar="RUN", help="another one to compare it with"
    )
    parser.add_argument(
        "--all", action="store_true", help="with one RUN: every checkpoint, not only the newest"
    )
    return parser


def _run_in(folder: Path) -> RunFolder:
    """As `run_of`. Raises: CheckpointError also if all steps were set aside."""
    run = run_of(folder)
    if not list_steps(run.checkpoints):
        raise CheckpointError(
            f"{run.checkpoints}: all steps are set aside. HINT: `cyxjax checkpoint ls {folder}` lists them."
        )
    return run


def read_bits(run: RunFolder, step: int) -> StepBits:
    """The digests of one checkpoint. Raises: CheckpointError that names run and step if it is damaged."""
    elsewhere = f"HINT: move {step_folder(run.checkpoints, step)} elsewhere to compare the rest."
    try:
        manifest, stored = open_step(run.checkpoints, step)
        leaves = {leaf.name: _sha256_of(stored.blocks(leaf.name)) for leaf in manifest.leaves}
    except CheckpointError as error:
        found = str(error).partition(" HINT:")[0]
        raise CheckpointError(f"{run.root}: {found} {elsewhere}") from error
    if other := contradicted_leaves(run.checkpoints, step, run.bits):
        raise CheckpointError(
            f"{run.root}: step {step} is not the state that the run recorded in bits.jsonl: {other[0]} "
            f"differs. {elsewhere}"
        )
    meta = manifest.meta
    curves = {name: meta.get("history", {}).get(name) for name in _CURVES}
    history = {"curves": curves, **{name: meta.get(name) for name in ("sums", "grad_norm", "position")}}
    return StepBits(leaves, _sha256(history), meta.get("exact", {}), meta.get("config", {}))


def as_json(run: RunFolder, every: bool) -> dict[str, Any]:
    """The digests of the newest step, or of every one, as plain values."""
    steps = list_steps(run.checkpoints)
    found = {step: read_bits(run, step) for step in (steps if every else steps[-1:])}
    fields = ("digest", "leaves", "history", "exact")
    return {"steps": [{"step": n, **{name: getattr(b, name) for name in fields}} for n, b in found.items()]}


def _lines(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in steps:
        digest, history = one["digest"][:_SHOWN], one["history"][:_SHOWN]
        yield f"step {one['step']}: {digest} ({len(one['leaves'])} leaves; history {history})"
        yield from (f"    {name}: {value}" for name, value in one["exact"].items())


def compare(one: RunFolder, other: RunFolder) -> tuple[list[str], bool]:
    """(lines to print, whether both runs are equal), comparing the checkpoints of common steps."""
    steps = {run: list_steps(run.checkpoints) for run in (one, other)}
    common = sorted(set(steps[one]) & set(steps[other]))
    recorded, equal = first_other_state(one, other)
    if not common and not recorded:
        raise CheckpointError(
            f"no step has a checkpoint in both runs: {steps[one]} and {steps[other]}. "
            "HINT: save both with the same checkpoint_every_n_steps."
        )
    lines = [recorded] if recorded and not (equal and common) else []
    before = 0
    for step in common:
        bits = read_bits(one, step), read_bits(other, step)
        if different := _differences(*bits):
            return [f"step {step}: {line}" for line in different] + lines + _cause(before, *bits), False
        before = step
    if common:
        lines.append(f"equal: every bit of {counted(len(common), 'checkpoint')}, the last of step {before}")
        later = {run: of[-1] for run, of in steps.items() if of[-1] > before}
        lines += [f"not compared: {run.root} continues to step {end}" for run, end in later.items()]
    return lines, equal


def first_other_state(one: RunFolder, other: RunFolder) -> tuple[str, bool]:
    """(line about the first step whose digests differ, whether they are equal in all common steps).

    The line is empty if the runs have no step in common in their `bits.jsonl`.
    """
    left, right = (read_digests(run.bits) for run in (one, other))
    common = sorted(left.keys() & right.keys())
    different = next((step for step in common if left[step] != right[step]), None)
    if different is None and common:
        ends = {run: max(found) for run, found in ((one, left), (other, right))}
        later = [
            f"; not compared: {run.root} continues to step {end}"
            for run, end in ends.items()
            if end > common[-1]
        ]
        return f"equal: digests of {len(common)} steps, the last {common[-1]}{''.join(later)}", True
    if different is None:
        return "", True
    names = sorted(left[different].keys() | right[different].keys())
    leaf = next(name for name in names if left[different].get(name) != right[different].get(name))
    before = max((step for step in common if step < different), default=0)
    since = f"; at step {before} they were equal" if before else ""
    return f"recorded digests: step {different} is the first that differs, in {leaf}{since}", False


def _differences(one: StepBits, other: StepBits) -> list[str]:
    names = sorted(one.leaves.keys() | other.leaves.keys())
    different = [name for name in names if one.leaves.get(name) != other.leaves.get(name)]
    lines = (
        [f"{len(different)} of {len(names)} leaves differ, the first is {different[0]}"] if different else []
    )
    return lines + (["the history differs"] if one.history != other.history else [])


def _cause(before: int, one: StepBits, other: StepBits) -> list[str]:
    """Where the difference may come from: between which steps, and which known facts differ."""
    lines = [f"they were equal at step {before}" if before else "no earlier step has a checkpoint in both"]
    for name in sorted(one.exact.keys() | other.exact.keys()):
        left, right = (bits.exact.get(name, "not recorded") for bits in (one, other))
        lines += [f"{name} differs: {left} and {right}"] if left != right else []
    keys = differing_values(one.config, other.config) if one.config and other.config else []
    return lines + [f"{key} differs: {left} and {right}" for key, left, right in keys]


def _sha256_of(blocks: Iterable[Any]) -> str:
    """Digest of an array's bytes in C order, with one block in memory at a time."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block.tobytes())
    return digest.hexdigest()


def _sha256(value: Any) -> str:
    """Digest of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
