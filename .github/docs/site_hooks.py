"""Makes parts of the pages from the code: a line `<!-- made: NAME -->` is replaced by what NAME gives."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cyxjax.cli import main  # noqa: E402
from cyxjax.config import help as config_help  # noqa: E402
from cyxjax.config.experiment import TrainConfig  # noqa: E402
from cyxjax.sync import registry  # noqa: E402
from cyxjax.train.start.named import METRICS  # noqa: E402
from tests.faults import matrix  # noqa: E402
from tests.guides import porting  # noqa: E402

_HELP_OF = ("train", "config", "plan")  # their pages are the keys, which stand in their own section
_OPTIONS = re.compile(r"(?<!pre>)(?<!pre><span></span>)<code>[^<]*-[^<]*</code>")
_OPTION = re.compile(r"(?<![^\s>])-{1,2}[a-z][\w.-]*")
_MARK = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its made parts; mkdocs calls this for every page.

    The mark of code that tests run, `python test`, is Markdown elsewhere but no fence to mkdocs.
    """
    return with_made_parts(markdown).replace("```python test\n", "```python\n")


def on_page_content(html: str, **_: Any) -> str:
    """The page with its options held together: a browser may end a line at the hyphens of `--config`."""
    return _OPTIONS.sub(lambda found: _OPTION.sub(r'<span class="option">\g<0></span>', found[0]), html)


def with_made_parts(markdown: str) -> str:
    """`markdown` with each mark replaced. Raises: KeyError for a name that is none of `MADE`."""
    return _MARK.sub(lambda found: MADE[found[1]](), markdown)


def keys() -> str:
    """A table of keys for each section of an experiment file."""
    parts = []
    for section, sentence, entries in config_help.sections(TrainConfig()):
        rows = [f"| `{one.key}` | {_line(one.text)}<br>`{one.kind}`{_default(one)} |" for one in entries]
        head = f"### `{section}`\n\n{sentence}\n" if section else "### Top level\n"
        parts.append("\n".join([head, "| key | |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(key: config_help.Key) -> str:
    return f", default `{key.default}`" if key.default else ""


def commands() -> str:
    """The list of commands, then the help page of each that takes options of its own."""
    rows = [f"| `cyxjax {name}` | {text} |" for name, (_, text) in main.ROWS.items()]
    pages = [
        f"### `cyxjax {name}`\n\n```text\n{_help(name)}\n```" for name in main.ROWS if name not in _HELP_OF
    ]
    return "\n\n".join(["\n".join(["| command | |", "| --- | --- |", *rows]), *pages])


def _help(command: str) -> str:
    shown = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="90"),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        main.dispatch([command, "--help"])
    return shown.getvalue().strip()


def examples() -> str:
    """The table of the examples, from their folder."""
    text = (ROOT / "scripts" / "examples" / "README.md").read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def strategies() -> str:
    """The table of strategies, from their entries."""
    head = ["`comm`", "a replica sends per optimizer step", "state besides the optimizer's", "use for"]
    head.append("`comm_options` with their defaults")
    rows = []
    for name, one in registry.STRATEGIES.items():
        takes = [p for p in signature(one.make).parameters.values() if p.name not in registry.NOT_OPTIONS]
        options = ", ".join(f"`{option.name}: {option.default}`" for option in takes)
        rows.append(f"| `{name}` | {' | '.join(one.row)} | {options.replace('True', 'true')} |")
    return "\n".join([f"| {' | '.join(head)} |", "| --- | --- | --- | --- | --- |", *rows])


def metrics() -> str:
    """The metrics that a configuration can name, with what makes them in Python."""
    rows = [f"| `{name}` | `cx.{kind.__name__}` |" for name, kind in METRICS.items()]
    return "\n".join(["| in a configuration | in Python |", "| --- | --- |", *rows])


MADE: dict[str, Callable[[], str]] = {
    "keys": keys,
    "commands": commands,
    "examples": examples,
    "porting": porting.table,
    "strategies": strategies,
    "metrics": metrics,
    "faults": matrix.table,
}
