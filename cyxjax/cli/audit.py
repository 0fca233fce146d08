"""`cyxjax audit RUN`: checks that each sample was used exactly once per epoch, and names what differs."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cyxjax.command import Parser, existing_folder, number
from cyxjax.config.load import open_run
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR
from cyxjax.train.runs.audit import examine, records_of


def main(argv: Sequence[str] | None = None) -> int:
    """Audits one run folder; returns the exit code: 0, or 1 with a line for each problem.

    Raises: DataError for a folder without a ledger, or with one that cyxjax did not write.
    """
    given = _parser().parse_args(argv)
    run = open_run(Path(os.path.abspath(given.run)))
    verdict = examine(*records_of(run), given.max_findings)
    if given.json:
        findings = [asdict(finding) for finding in verdict.findings]
        print(json.dumps({"good": not findings, **verdict._asdict(), "findings": findings}))
        return EXIT_USER_ERROR if findings else EXIT_OK
    for line in (*verdict.findings, *verdict.notes, verdict.summary):
        print(line)
    return EXIT_USER_ERROR if verdict.findings else EXIT_OK


def _parser() -> Parser:
    parser = Parser(prog="cyxjax audit", description=__doc__, epilog="example: cyxjax audit runs/digits")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "run", type=existing_folder, metavar="RUN", help="a run folder that contains ledger.jsonl"
    )
    parser.add_argument(
        "--max-findings", type=number(1, 10**9), default=10, metavar="N", help="stop after N findings"
    )
    return parser
