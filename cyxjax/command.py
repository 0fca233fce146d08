"""What all our command lines share: one-line errors for wrong arguments, and help that a pipe may cut off."""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from cyxjax.errors import ConfigError


def prepare_streams() -> None:
    """Opens the null device as standard input, output or error if this process was started without it.

    Otherwise the next opened file would get that descriptor, and printed text would go into that file.
    Standard output then shows `?` for what its encoding lacks, such as a letter of a path.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, `fd`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one-line ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        choices = [one.choices for one in self._actions if isinstance(one.choices, dict)]
        inner = [parser for commands in choices for parser in commands.values()]
        actions = [action for parser in (self, *inner) for action in parser._actions]
        options = [option for action in actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown, options, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{message} (from the command line).{meant} HINT: {usage}; see --help.")

    def _print_message(self, message: str, file: Any = None) -> None:
        show(message)  # a page of help: errors are raised


def number(low: float, high: float, kind: type = int) -> Callable[[str], Any]:
    """A type for argparse: a whole number (kind=float: any number) from `low` to `high`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # outside any bounds
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected {what} from {low} to {high}")
        return value

    return parse


def existing_folder(word: str) -> Path:
    """The folder named on the command line, which must exist: a type for argparse."""
    if not Path(word).is_dir():
        raise argparse.ArgumentTypeError(f"{word}: no such folder")
    return Path(word)


@contextmanager
def quiet_output() -> Iterator[None]:
    """A block in which nothing reaches standard output: what is written there, by C++ too, goes to stderr.

    A script that reads standard output then gets only the document that is printed after the block.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
        sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show(text: str) -> None:
    """Writes `text` to standard output; a closed pipe (`| head`) is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Discards what is still buffered: Python's flush at exit must not write to the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
