"""Which test injects which fault (R1 to R42); the documentation shows the table.

python -m tests.faults.matrix   # prints it
"""

from tests.faults.matrix_launcher import LAUNCHER
from tests.faults.matrix_processes import HOSTS, PROCESSES
from tests.faults.matrix_training import TRAINING

ROWS = [*PROCESSES, *TRAINING, *HOSTS, *LAUNCHER]


def table() -> str:
    """The rows as a Markdown table, each with the files below tests/ that contain its tests."""
    lines = ["| row | fault | what happens | its tests |", "| --- | --- | --- | --- |"]
    for row in ROWS:
        files = dict.fromkeys(test.partition("::")[0] for test in row.tests)
        lines.append(f"| {row.rows} | {row.fault} | {row.outcome} | {', '.join(f'`{f}`' for f in files)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
