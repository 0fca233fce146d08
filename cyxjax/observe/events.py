"""What befell a run, a line each in `events.jsonl`: starts, saves, rollbacks, test results, ends.

For people and the report; training reads none of it. `{"event": "save", "at_unix_s": ..., "step": 400}`
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cyxjax.files import append, read_plain
from cyxjax.observe.records import or_told, plain

_MAX_BYTES = 64 << 20  # of the newest lines that are read back


class Events(Protocol):
    """Takes what happens, a name and plain values each. begun: whether this process's start was told."""

    begun: bool

    def log(self, event: str, **values: Any) -> None: ...


class NullEvents:
    """Keeps nothing: other ranks, and `report: false`."""

    begun = False

    def log(self, event: str, **values: Any) -> None: ...


class EventLog:
    """Events as lines of the file at `path`; one that cannot be written is told once, and nothing else.

    A start at step 0 begins a new file, unless the last run in it was cut short: then it is that run again.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self.begun, self._warned = path, warn, False, False

    def log(self, event: str, **values: Any) -> None:
        line = {"event": event, "at_unix_s": time.time(), **_plain(values)}
        with or_told(self._path, self._warn_once):
            if event == "start" and not self.begun:
                self.begun = True
                self._put_aside(values.get("step", 0))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append(self._path, (json.dumps(line, allow_nan=False) + "\n").encode(), durable=False)

    def _put_aside(self, step: int) -> None:
        names = [event["event"] for event in read_events(self._path)]
        if step == 0 and "end" in names[-1 - names[::-1].index("start") if "start" in names else 0 :]:
            os.replace(self._path, self._path.with_name(self._path.name + ".old"))

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in `path`, oldest first; [] if there is no such file. Lines that are none are left out."""
    try:
        raw = read_plain(path, _MAX_BYTES)
    except OSError:
        return []
    found = []
    for line in raw.decode("utf-8", "replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a crash
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            found.append(event)
    return found


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None else plain(value)
