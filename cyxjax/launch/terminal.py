"""The launcher's terminal as its ranks use it: they write into pipes, and the launcher writes on the screen.

A rank learns the width of the terminal from a variable. It marks the line that the next one replaces; the
launcher draws a marked line at the foot of the screen, and keeps it out of the ranks' log files.
"""

import os
import sys
from collections.abc import Mapping

CLEAR_TO_END = "\x1b[K"
_COLUMNS = "CYXJAX_TERMINAL_COLUMNS"
_MARK = b"\x1b_cyxjax-live\x1b\\"  # an application command of ECMA-48, which terminals do not show


def variables(prefix: str, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What tells a rank how wide its lines may be behind `prefix`; empty where nobody watches a terminal."""
    if sys.stdout is None or not sys.stdout.isatty() or env.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return {}
    return {_COLUMNS: str(os.get_terminal_size(sys.stdout.fileno()).columns - len(prefix))}


def relayed_columns(env: Mapping[str, str] = os.environ) -> int | None:
    """The width of the launcher's terminal for this rank; None where no launcher shows a terminal."""
    columns = env.get(_COLUMNS, "")
    return int(columns) if columns.isdigit() else None


def live_line(text: str, *, relayed: bool) -> str:
    """`text` as the line at the foot of a terminal, which the next one replaces."""
    return f"{_MARK.decode()}{text}\n" if relayed else f"\r{text}{CLEAR_TO_END}"


def marked(line: bytes) -> bytes | None:
    """The text of a line that a rank has marked as live; None for any other line."""
    return line[len(_MARK) :].rstrip(b"\n") if line.startswith(_MARK) else None
