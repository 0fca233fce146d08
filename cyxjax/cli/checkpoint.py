"""`cyxjax checkpoint ls|verify|export|prune DIR`: works on stored checkpoints without starting a run."""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cyxjax.checkpoint.folders import (
    list_aside,
    list_steps,
    remove_aside,
    step_folder,
)
from cyxjax.checkpoint.manifest import find_problems, read_manifest
from cyxjax.checkpoint.run_lock import locked
from cyxjax.command import Parser, existing_folder, number
from cyxjax.config.load import open_run
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR, CheckpointError, ConfigError
from cyxjax.observe.state_digests import contradicted_leaves
from cyxjax.run_folder import RunFolder

_ASIDE = {
    "corrupt": "set aside because it did not verify",
    "abandoned": "set aside because the run continued from an earlier step",
    "earlier": "kept from an earlier run in this folder",
}
_EXAMPLES = {"export": " digits.safetensors", "prune": " --keep-last 2"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the commands; returns the exit code: 0, or 1 if `verify` found damage.

    Raises: CheckpointError for a folder without steps, in use, or damaged where a good step is needed.
    """
    given = _parser().parse_args(argv)
    return int(given.run(run_of(given.directory), given))


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax checkpoint",
        description=__doc__,
        epilog="example: cyxjax checkpoint ls runs/digits/checkpoints",
    )
    commands = parser.add_subparsers(required=True, metavar="ls|verify|export|prune")
    ls = _command(commands, "ls", _ls, "list the steps (their manifests only; verify reads the files)")
    ls.add_argument("--json", action="store_true", help="print all steps as one JSON list")
    verify = _command(
        commands, "verify", _verify, "read every file and compare its digest; exit code 1 if one differs"
    )
    verify.add_argument("--step", type=int, help="verify only this step")
    verify.add_argument("--json", action="store_true", help="print all steps as one JSON list")
    export = _command(commands, "export", _export, "write parameters for other programs")
    export.add_argument(
        "file", type=Path, help="the file to write, overwritten if it exists; for orbax a new folder"
    )
    export.add_argument("--to", choices=("safetensors", "orbax"), default="safetensors", help="the format")
    export.add_argument("--step", type=int, help="the step to export; default: the newest that verifies")
    export.add_argument("--part", action="append", help="part of the state; default: params and model_state")
    prune = _command(
        commands, "prune", _prune, "delete all steps except the newest and best, and what was set aside"
    )
    prune.add_argument("--keep-last", type=number(1, 10**9), required=True, metavar="N")
    prune.add_argument("--keep-best", type=number(0, 10**9), default=1, metavar="K")
    best = "which metric values are best; default: as the run monitors"
    prune.add_argument("--best", choices=("min", "max"), help=best)
    prune.add_argument(
        "--keep-corrupt",
        type=number(0, 10**9),
        default=1,
        metavar="C",
        help="of the steps set aside because they did not verify, keep the C latest; default: 1",
    )
    return parser


def _command(commands: Any, name: str, run: Callable, text: str) -> Parser:
    example = f"example: cyxjax checkpoint {name} runs/digits{_EXAMPLES.get(name, '')}"
    parser: Parser = commands.add_parser(name, help=text, description=text, epilog=example)
    parser.add_argument(
        "directory", type=existing_folder, metavar="DIR", help="a run folder or its checkpoints folder"
    )
    parser.set_defaults(run=run)
    return parser


def run_of(directory: Path) -> RunFolder:
    """The run in `directory`, or the one whose checkpoints it holds; a run without records if none is known.

    Raises: CheckpointError if there is no checkpoint.
    """
    directory = Path(os.path.abspath(directory))
    run = open_run(directory)
    if not run.checkpoints.is_dir():
        above = (open_run(root) for root in directory.parents if RunFolder(root).bits.is_file())
        found = (one for one in above if Path(os.path.abspath(one.checkpoints)) == directory)
        run = next(found, RunFolder(directory, ""))
    if not list_steps(run.checkpoints) and not any(list_aside(run.checkpoints, why) for why in _ASIDE):
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint. HINT: name a run folder, or the folder with step_*."
        )
    return run


def _ls(run: RunFolder, given: argparse.Namespace) -> int:
    rows = [
        {"step": step} | _facts(step_folder(run.checkpoints, step)) for step in list_steps(run.checkpoints)
    ]
    if given.json:
        print(json.dumps(rows))
        return EXIT_OK
    print(f"{'step':>10}  {'saved (UTC)':<19}  {'MB':>10}  metric")
    for row in rows:
        print(f"{row['step']:>10}  {_line(row)}")
    for why, note in _ASIDE.items():
        for name in list_aside(run.checkpoints, why):
            print(f"{name}: {note}")
    return EXIT_OK


def _facts(folder: Path) -> dict[str, Any]:
    try:
        found = read_manifest(folder)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"saved_unix_s": found.created_unix_s, "num_bytes": found.num_bytes, "metric": found.metric}


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"]).partition(" HINT:")[0]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["saved_unix_s"]))
    metric = "-" if row["metric"] is None else f"{row['metric']:.6g}"
    return f"{saved}  {row['num_bytes'] / 1e6:>10.2f}  {metric}"


def _verify(run: RunFolder, given: argparse.Namespace) -> int:
    steps = [step for step in list_steps(run.checkpoints) if given.step in (None, step)]
    if given.step is not None and not steps:
        raise CheckpointError(
            f"{run.checkpoints}: no step {given.step}. HINT: `cyxjax checkpoint ls` lists the steps."
        )
    rows = []
    for step in steps:
        problems = find_problems(step_folder(run.checkpoints, step), step) or [
            f"the digest of {leaf} differs from the one in bits.jsonl for this step"
            for leaf in contradicted_leaves(run.checkpoints, step, run.bits)
        ]
        rows.append({"step": step, "good": not problems, "problems": problems})
        if not given.json:
            print(f"step {step}: {'damaged: ' + '; '.join(problems) if problems else 'good'}")
    if given.json:
        print(json.dumps(rows))
    else:
        for name in list_aside(run.checkpoints, "corrupt"):
            print(f"{name}: {_ASIDE['corrupt']}")
    return EXIT_OK if rows and all(row["good"] for row in rows) else EXIT_USER_ERROR


def _export(run: RunFolder, given: argparse.Namespace) -> int:
    from cyxjax.checkpoint.exporting import entry_of, to_orbax, to_safetensors
    from cyxjax.checkpoint.restoring import open_step

    manifest, stored = open_step(run.checkpoints, given.step)
    step = manifest.step
    parts = tuple(given.part or ("params", "model_state"))
    wanted = {leaf.name: leaf for leaf in manifest.leaves if leaf.name.split("/")[0] in parts}
    if not wanted:
        known = ", ".join(sorted({leaf.name.split("/")[0] for leaf in manifest.leaves}))
        raise CheckpointError(f"Step {step} has none of {', '.join(parts)}. HINT: its parts are {known}.")
    entries = {name: entry_of(manifest, stored, leaf) for name, leaf in wanted.items()}
    if given.to == "orbax":
        to_orbax(given.file, {name: entry.read() for name, entry in entries.items()})
    else:
        to_safetensors(given.file, entries, {"cyxjax_step": str(step)})
    num_bytes = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries.values())
    print(f"step {step}: {len(wanted)} arrays, {num_bytes / 1e6:.2f} MB -> {given.file}")
    return EXIT_OK


def _best(directory: Path) -> Literal["min", "max"]:
    """Which values of the newest step's metric are best. Raises: ConfigError if its run does not say."""
    steps = list_steps(directory)
    config = read_manifest(step_folder(directory, steps[-1])).meta.get("config") if steps else None
    config = config if isinstance(config, dict) else {}  # a checkpoint may be of another program
    metric = str(config.get("monitor", "val_loss")).partition("_")[2]
    mode = config.get("monitor_mode") or {"loss": "min", "accuracy": "max"}.get(metric)
    if mode not in ("min", "max"):
        raise ConfigError(f"--best: the run monitors {metric!r}. HINT: give --best min or --best max.")
    return "max" if mode == "max" else "min"


def _prune(run: RunFolder, given: argparse.Namespace) -> int:
    from cyxjax.checkpoint.store import StepStore

    with locked(run.checkpoints):  # not during a job, which deletes old steps in the same folder itself
        store = StepStore(run.checkpoints, is_writer=True)
        best = given.best or _best(run.checkpoints)
        gone = [f"step {step}" for step in store.prune(given.keep_last, given.keep_best, best)]
        gone += remove_aside(run.checkpoints, given.keep_corrupt)
    print(f"deleted {', '.join(gone)}" if gone else "nothing to delete")
    return EXIT_OK
