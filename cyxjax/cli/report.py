"""`cyxjax report RUN [RUN ...]`: an HTML report of one run, or of several that are compared."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyxjax.command import Parser, existing_folder
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import open_run
from cyxjax.config.yaml_file import read_yaml
from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.files import write_whole
from cyxjax.observe.report import outcome
from cyxjax.observe.report.facts import RunFacts, read_facts
from cyxjax.observe.report.page import page
from cyxjax.run_folder import RunFolder
from cyxjax.train.reporting import audit_of


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path. Raises: ConfigError for folders that hold no run."""
    given = _parser().parse_args(argv)
    path = given.output or (given.runs[0] / "report.html" if len(given.runs) == 1 else Path("report.html"))
    facts = [_facts(run) for folder in given.runs for run in _runs_in(folder)]
    if given.json:
        print(json.dumps([as_json(run) for run in facts]))
        return EXIT_OK
    try:
        write_whole(path, page(facts))
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written: {err.strerror or err}. HINT: --output FILE.") from None
    print(path)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax report",
        description="Writes a report of a run, or of several compared, as one HTML file that opens offline.",
        epilog="example: cyxjax report runs/digits runs/digits-lr-0.01 --output compared.html",
    )
    parser.add_argument(
        "runs", type=existing_folder, nargs="+", metavar="RUN", help="a run folder, or a folder of runs"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON; write no page")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in RUN; for several runs, in the current folder",
    )
    return parser


def as_json(run: RunFacts) -> dict[str, Any]:
    """The first section of the page as plain values, for a script."""
    return {
        "name": run.name,
        "folder": run.folder,
        "headline": outcome.headline(run),
        "results": outcome.results(run),
        "seconds": run.seconds,
        "starts": [start._asdict() for start in outcome.starts(run.events)],
        "changed": run.changed,
        "audit": {"good": run.audit.good, "lines": run.audit.lines},
        "notes": run.notes,
    }


def _runs_in(root: Path) -> list[RunFolder]:
    """The run in `root`, or all below it. Raises: ConfigError if there is none."""
    found = []
    for folder, inner, _ in os.walk(os.path.abspath(root)):
        run = RunFolder(Path(folder))
        if any(path.is_file() for path in (run.history, run.metrics, run.events)):
            found.append(open_run(run.root))
            inner.clear()  # a run folder contains no other runs
    if not found:
        raise ConfigError(
            f"{root} holds no run. HINT: name the run_dir of an experiment, or a folder of them."
        )
    return sorted(found, key=lambda run: run.root)


def _facts(run: RunFolder) -> RunFacts:
    config = read_yaml(str(run.config)) if run.config.is_file() else {}
    return read_facts(run, config, TrainConfig().resolved(), audit_of(run))
