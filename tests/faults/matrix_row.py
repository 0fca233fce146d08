"""One line of the fault matrix."""

from typing import NamedTuple


class Row(NamedTuple):
    """One line of the matrix. `tests` are files, functions or node ids below tests/."""

    rows: str  # "R1", or several: "R1, R2"
    fault: str
    outcome: str
    tests: tuple[str, ...]


def tests_in(file: str, *names: str) -> tuple[str, ...]:
    """Node ids of the tests `names` of `file`."""
    return tuple(f"{file}::{name}" for name in names)
