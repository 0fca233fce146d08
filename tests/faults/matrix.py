"""Which test injects which fault (R1 to R42), and what was measured; the documentation shows the table.

python -m tests.faults.matrix                      # prints the table
python -m tests.faults.matrix --measure [R31 ...]  # runs the tests of all rows, or of these; keeps seconds
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.matrix_launcher import LAUNCHER
from tests.faults.matrix_processes import HOSTS, PROCESSES
from tests.faults.matrix_row import Row
from tests.faults.matrix_training import TRAINING

ROWS = [*PROCESSES, *TRAINING, *HOSTS, *LAUNCHER]
ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).with_name("measured.json")


def belongs(node: str, test: str) -> bool:
    """Whether the test `node` is `test`, or one of it: of its parameters, of its file."""
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def table(measured: Mapping[str, float]) -> str:
    """The rows as a Markdown table; `measured` is seconds by test."""
    lines = ["| row | fault | what happens | its tests |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.rows} | {row.fault} | {row.outcome} | {_took(row, measured)} |" for row in ROWS]
    return "\n".join(lines)


def _took(row: Row, measured: Mapping[str, float]) -> str:
    found = [seconds for node, seconds in measured.items() if any(belongs(node, test) for test in row.tests)]
    total = f"{sum(found):.1f} s"
    return total if len(found) == 1 else f"{len(found)}: {total}"


def run(tests: Sequence[str]) -> dict[str, float | str]:
    """Runs `tests`, slow ones too: seconds by test, or why it was skipped.

    Raises: SystemExit if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-m", "", f"--junitxml={report}", *(f"tests/{test}" for test in tests)]
        code = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode
        if code:
            raise SystemExit(f"pytest ended with {code}: nothing is written. HINT: make these tests pass.")
        return read_report(report)


def read_report(report: Path) -> dict[str, float | str]:
    """Seconds (to 0.1) by test of a JUnit `report`, or the reason of a skip."""
    found: dict[str, float | str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        skip = case.find("skipped")
        value = round(float(case.get("time", 0)), 1) if skip is None else skip.get("message", "skipped")
        found[f"{file}.py::{case.get('name')}"] = value
    return found


def refuse_skips(found: Mapping[str, float | str], rows: Sequence[Row]) -> None:
    """Raises: SystemExit naming each skipped test whose row does not say which package it needs."""
    for node, value in found.items():
        of = [row for row in rows if any(belongs(node, test) for test in row.tests)]
        if isinstance(value, str) and not any(row.needs and row.needs in value for row in of):
            raise SystemExit(f"{node} was skipped: {value}. HINT: measure where it runs.")


def measure(names: Sequence[str]) -> None:
    """Runs the rows `names` (all if none), and writes measured.json."""
    rows = [row for row in ROWS if not names or set(names) & set(row.rows.split(", "))]
    found = run(sorted({test for row in rows for test in row.tests}))
    refuse_skips(found, rows)
    fresh = {node: value for node, value in found.items() if not isinstance(value, str)}
    older = json.loads(MEASURED.read_text()) if names else {}
    known = [test for row in ROWS for test in row.tests]
    measured = {node: s for node, s in (older | fresh).items() if any(belongs(node, t) for t in known)}
    MEASURED.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--measure", nargs="*", metavar="ROW", help="run the tests of all rows, or of these")
    given = parser.parse_args()
    if given.measure is None:
        print(table(json.loads(MEASURED.read_text())))
    else:
        measure(given.measure)


if __name__ == "__main__":
    main()
