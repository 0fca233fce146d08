"""Digests of a run's whole state every so many steps, a line each in `bits.jsonl`: for `cyxjax hash RUN RUN`.

`{"step": 100, "leaves": {"params/Dense_0/kernel": "5f1c...", ...}}`; `{"begin": 100}` where a run goes on
from step 100: what was written of later steps before it belongs to a course that was given up.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cyxjax.files import append, read_plain
from cyxjax.observe.records import or_told

_MAX_BYTES = 256 << 20  # of the newest lines that are read back


class DigestFile:
    """Takes digests; one that cannot be written is told, and training goes on."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._told = path, warn, False

    def begin(self, step: int) -> None:
        """What follows goes on from `step`."""
        self._add({"begin": step})

    def add(self, step: int, leaves: Mapping[str, str]) -> None:
        """leaves: digests by name."""
        self._add({"step": step, "leaves": dict(leaves)})

    def _add(self, line: dict[str, Any]) -> None:
        with or_told(self._path, self._warn_once):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append(self._path, (json.dumps(line) + "\n").encode(), durable=False)

    def _warn_once(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._warn(text)


def read_digests(path: Path) -> dict[int, dict[str, str]]:
    """Digests by leaf, by step, of the course the run took in the end; {} without such a file."""
    try:
        raw = read_plain(path, _MAX_BYTES)
    except OSError:
        return {}
    found: dict[int, dict[str, str]] = {}
    for text in raw.decode("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
            if "begin" in line:
                found = {step: leaves for step, leaves in found.items() if step <= line["begin"]}
            else:
                found[int(line["step"])] = dict(line["leaves"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash
    return found
