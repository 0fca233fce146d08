"""The habits of all our command lines: one line for a wrong word, and help that a pipe may cut short."""

import argparse
import os
import sys
from typing import Any, NoReturn

from cyxjax.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors of one line."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigError(f"{message} (from the command line). HINT: {usage}; see --help.")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            show(message)
        else:
            super()._print_message(message, file)


def show(text: str) -> None:
    """Writes `text` to standard output; a reader that has left (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Sends what is still buffered nowhere: Python's flush at exit must not meet the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
