"""Metrics as files of the run folder: JSON lines and CSV. Both can go on after a restart without
repeating a step.
"""

import csv
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cyxjax.files import open_plain, read_json_lines
from cyxjax.observe.records import Record, plain_record, write_atomic


class JsonlSink:
    """One JSON object a line, flushed line by line, so that a crash loses nothing that was logged.

    With `resume_step` the records up to that step stay and later ones are dropped (they will be made
    again); without it an existing file is put aside as `*.old`.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(path)
        kept = [json.dumps(r) for r in _kept(read_json_lines(self.path), self.path, resume_step)]
        write_atomic(self.path, "".join(line + "\n" for line in kept))
        self._file = open_plain(self.path, "a", encoding="utf-8")

    def log(self, record: Record) -> None:
        self._file.write(json.dumps(plain_record(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvSink:
    """A table with one column per key; a new key widens the table. Resumes as `JsonlSink` does."""

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        self.path = Path(path)
        rows = _kept(_read_csv(self.path), self.path, resume_step)
        self._columns = list(dict.fromkeys(key for row in rows for key in row))
        self._rewrite(rows)

    def log(self, record: Record) -> None:
        row: dict[str, Any] = plain_record(record)
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite([*_read_csv(self.path), row])
        else:
            with open_plain(self.path, "a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def close(self) -> None: ...

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        if self._columns:
            writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path, text.getvalue())


def _read_csv(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with open_plain(path, "r", encoding="utf-8", errors="replace", newline="") as file:
        return [{k: v for k, v in row.items() if k and v not in ("", None)} for row in csv.DictReader(file)]


def _step_of(record: dict[str, Any]) -> float:
    """NaN where the record says no step."""
    try:
        return float(record.get("step", 0))
    except (TypeError, ValueError):
        return math.nan


def _kept(records: Iterable[dict[str, Any]], path: Path, resume_step: int | None) -> list[dict[str, Any]]:
    """The records that stay; a file that belongs to another run is put aside first."""
    if resume_step is not None:
        return [record for record in records if not _step_of(record) > resume_step]
    if path.exists() and path.stat().st_size:
        path.replace(path.with_name(path.name + ".old"))
    return []
