"""`cyxjax hash RUN [RUN]`: digests of a run's checkpoints, or where those of two runs first differ."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.store import StepStore
from cyxjax.command import Parser, existing_folder
from cyxjax.config.compared import differing_values
from cyxjax.config.load import open_run
from cyxjax.data.ledger import walk
from cyxjax.data.ledger_file import read_ledger
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR, CheckpointError, DamagedStep
from cyxjax.observe.state_digests import contradicted_leaves, read_digests

# Of a history, what follows from the numbers alone: no times, no counts of processes.
_CURVES = (
    *("train_losses", "train_accuracies", "val_losses", "val_accuracies", "learning_rates", "metrics"),
    *("epochs", "val_epochs", "grad_norms", "grad_norm_epochs"),
    *("rollback_epochs", "rollback_samples", "rollback_batches", "rollback_steps"),
)
_SHOWN = 12  # digits of a digest on the screen


class StepBits(NamedTuple):
    """One checkpoint, as digests."""

    leaves: dict[str, str]  # by name, as params/Dense_0/kernel
    history: str
    exact: dict[str, str]  # what the bits depend on, as an exact run wrote it
    config: dict[str, Any]

    @property
    def digest(self) -> str:
        return _sha256(json.dumps(self.leaves, sort_keys=True).encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints digests; the exit code: 0, or 1 if two runs differ.

    Raises: CheckpointError for a run without checkpoints, or two without a common step.
    """
    given = _parser().parse_args(argv)
    runs = [Path(os.path.abspath(path)) for path in given.runs]
    if len(runs) > 2:
        _parser().error(f"expected one run or two, got {len(runs)}")
    if len(runs) == 1:
        print(
            json.dumps(_as_json(runs[0], given.all)) if given.json else "\n".join(_lines(runs[0], given.all))
        )
        return EXIT_OK
    lines, equal = compare(*runs)
    print(json.dumps({"equal": equal, "said": lines}) if given.json else "\n".join(lines))
    return EXIT_OK if equal else EXIT_USER_ERROR


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax hash", description=__doc__, example="cyxjax hash runs/on-2-hosts runs/on-8-hosts"
    )
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    parser.add_argument("runs", type=existing_folder, nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--all", action="store_true", help="of one run: every checkpoint, not only the newest"
    )
    return parser


def steps_of(run: Path) -> list[int]:
    """Steps with a checkpoint, oldest first. Raises: CheckpointError if there is none."""
    folder = _checkpoints(run)
    steps = list_steps(folder) if folder.is_dir() else []
    if not steps:
        raise CheckpointError(f"{run} holds no checkpoint. HINT: name a run folder that has saved a step.")
    return sorted(steps)


def read_bits(run: Path, step: int) -> StepBits:
    """Raises: CheckpointError where the step is damaged, with run and step."""
    store = StepStore(_checkpoints(run), is_writer=False)
    try:
        manifest = store.manifest(step)
        stored = store.open(step, manifest)
        leaves = {leaf.name: _sha256_of(stored.blocks(leaf.name)) for leaf in manifest.leaves}
    except DamagedStep as error:
        found, folder = str(error).rstrip("."), step_folder(store.directory, step)
        raise CheckpointError(
            f"{run}: step {step} is damaged: {found}. HINT: move {folder} elsewhere to compare the rest."
        ) from error
    if other := contradicted_leaves(store.directory, step, open_run(run).bits):
        raise CheckpointError(
            f"{run}: step {step} is not the state that the run recorded in bits.jsonl: {other[0]} differs. "
            f"HINT: move {step_folder(store.directory, step)} elsewhere to compare the rest."
        )
    meta = manifest.meta
    curves = {name: meta.get("history", {}).get(name) for name in _CURVES}
    history = {"curves": curves, **{name: meta.get(name) for name in ("sums", "grad_norm", "position")}}
    digest = _sha256(json.dumps(history, sort_keys=True).encode())
    return StepBits(leaves, digest, meta.get("exact", {}), meta.get("config", {}))


def _as_json(run: Path, every: bool) -> dict[str, Any]:
    steps = steps_of(run)
    found = {step: read_bits(run, step) for step in (steps if every else steps[-1:])}
    fields = ("digest", "leaves", "history", "exact")
    return {"steps": [{"step": n, **{name: getattr(b, name) for name in fields}} for n, b in found.items()]}


def _lines(run: Path, every: bool) -> list[str]:
    steps = steps_of(run)
    lines = []
    for step in steps if every else steps[-1:]:
        bits = read_bits(run, step)
        parts = {name.split("/")[0] for name in bits.leaves}
        each = [f"{part} {_of_part(bits, part)}" for part in sorted(parts)]
        each.append(f"history {bits.history[:_SHOWN]}")
        lines.append(f"step {step}: {bits.digest[:_SHOWN]} ({', '.join(each)})")
        lines += [f"    {name}: {value}" for name, value in bits.exact.items()]
    return lines


def _of_part(bits: StepBits, part: str) -> str:
    inside = {name: value for name, value in bits.leaves.items() if name.split("/")[0] == part}
    return _sha256(json.dumps(inside, sort_keys=True).encode())[:_SHOWN]


def compare(one: Path, other: Path) -> tuple[list[str], bool]:
    """(lines to print, whether both runs are equal), comparing the checkpoints of common steps."""
    common = sorted(set(steps_of(one)) & set(steps_of(other)))
    between = first_other_state(one, other)
    if not common and between is not None:
        return [between.text], between.equal
    if not common:
        raise CheckpointError(
            f"no step has a checkpoint in both: {steps_of(one)} and {steps_of(other)}. "
            "HINT: save both with the same checkpoint_every_n_steps."
        )
    before = 0
    for step in common:
        bits = read_bits(one, step), read_bits(other, step)
        different = _differences(*bits)
        if different:
            digests = [between.text] if between is not None and not between.equal else []
            cause = _cause(one, other, before, step, bits)
            return [f"step {step}: {line}" for line in different] + digests + cause, False
        before = step
    equal = f"equal: every bit of {len(common)} checkpoints, the last of step {before}"
    if between is not None and not between.equal:
        return [between.text, equal], False
    return [equal, *_further(one, other, before)], True


def _further(one: Path, other: Path, step: int) -> list[str]:
    """A line for a run that goes on after `step`, the last that was compared."""
    ends = {run: max(steps_of(run)) for run in (one, other)}
    return [f"not compared: {run} goes on to step {end}" for run, end in ends.items() if end > step]


class States(NamedTuple):
    """The comparison of the recorded digests of two runs."""

    equal: bool
    text: str


def first_other_state(one: Path, other: Path) -> States | None:
    """The first step whose digests differ; None if the runs have no step in common in their `bits.jsonl`."""
    left, right = (read_digests(open_run(run).bits) for run in (one, other))
    common = sorted(left.keys() & right.keys())
    different = next((step for step in common if left[step] != right[step]), None)
    if different is None:
        return (
            States(True, f"equal: digests of {len(common)} steps, the last {common[-1]}") if common else None
        )
    names = sorted(left[different].keys() | right[different].keys())
    leaf = next(name for name in names if left[different].get(name) != right[different].get(name))
    before = max((step for step in common if step < different), default=0)
    since = f"; at step {before} they were equal" if before else ""
    return States(False, f"recorded digests: step {different} is the first that differs, in {leaf}{since}")


def _differences(one: StepBits, other: StepBits) -> list[str]:
    names = sorted(one.leaves.keys() | other.leaves.keys())
    different = [name for name in names if one.leaves.get(name) != other.leaves.get(name)]
    lines = (
        [f"{len(different)} of {len(names)} leaves differ, the first is {different[0]}"] if different else []
    )
    return lines + (["the history differs"] if one.history != other.history else [])


def _cause(one: Path, other: Path, before: int, step: int, bits: tuple[StepBits, StepBits]) -> list[str]:
    """Where to look: between which steps, and what is known to differ."""
    lines = [f"they were equal at step {before}" if before else "no earlier step has a checkpoint in both"]
    names = sorted(bits[0].exact.keys() | bits[1].exact.keys())
    for name in names:
        left, right = (found.exact.get(name, "not recorded") for found in bits)
        lines += [f"{name} differs: {left} and {right}"] if left != right else []
    lines += [f"{key} differs: {left} and {right}" for key, left, right in _keys(bits)]
    samples = _first_other_samples(one, other)
    if samples is not None and samples <= step:
        lines.append(f"the samples up to step {samples} differ according to the ledgers")
    return lines


def _keys(bits: tuple[StepBits, StepBits]) -> list[tuple[str, str, str]]:
    """(key, of the one, of the other) of the configurations."""
    one, other = (found.config for found in bits)
    return differing_values(one, other) if one and other else []


def _first_other_samples(one: Path, other: Path) -> int | None:
    """The first end of a span up to which samples differ; None if there is none, or a run has no ledger."""
    paths = [open_run(run).ledger for run in (one, other)]
    if not all(path.is_file() for path in paths):
        return None
    ours, theirs = ({one.after.steps: one.after for one in walk(read_ledger(path).records)} for path in paths)
    return min((n for n in ours.keys() & theirs.keys() if not ours[n].same(theirs[n])), default=None)


def _checkpoints(run: Path) -> Path:
    return open_run(run).checkpoints


def _sha256_of(blocks: Iterable[Any]) -> str:
    """Digest of an array's bytes in C order, a block in memory at a time."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block.tobytes())
    return digest.hexdigest()


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
