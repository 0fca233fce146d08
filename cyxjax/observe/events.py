"""The events of a run, one line each in `events.jsonl`: starts, saves, rollbacks, test results, ends.

For people and the report; training does not read it. `{"event": "save", "at_unix_s": ..., "step": 400}`
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyxjax.files import read_json_lines
from cyxjax.observe.records import add_line, once, plain_tree, warn_if_unwritten


class Events:
    """Discards events: for other ranks, and for `report: false`."""

    def begin(self, step: int, starts_over: bool) -> None:
        """Begins a start of a run at `step`. starts_over: whether an interrupted run is not continued."""

    def log(self, event: str, **values: Any) -> None:
        """Logs `event`, with plain values."""


class EventLog(Events):
    """Events as lines of the file at `path`; an error in writing is reported once and ignored.

    A start at step 0 begins a new file, unless the last run in it was interrupted: then it continues that
    run.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, once(warn)

    def begin(self, step: int, starts_over: bool) -> None:
        names = [event["event"] for event in read_events(self._path)]
        ended = "end" in names[-1 - names[::-1].index("start") if "start" in names else 0 :]
        with warn_if_unwritten(self._path, self._warn):
            if names and (starts_over or (step == 0 and ended)):
                os.replace(self._path, self._path.with_name(self._path.name + ".old"))

    def log(self, event: str, **values: Any) -> None:
        add_line(self._path, {"event": event, "at_unix_s": time.time(), **plain_tree(values)}, self._warn)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in `path`, oldest first; [] if there is no such file. Other lines are ignored."""
    try:
        lines = read_json_lines(path)
    except OSError:
        return []
    return [line for line in lines if isinstance(line.get("event"), str)]
