"""The output of a run: the console, and the sinks that receive its records."""

from cyxjax.observe.console import Console, NullConsole, PlainConsole, RichConsole, build_console
from cyxjax.observe.records import Sink
from cyxjax.observe.sinks import MultiSink, NullSink, build_sinks

__all__ = [
    "Console",
    "MultiSink",
    "NullConsole",
    "NullSink",
    "PlainConsole",
    "RichConsole",
    "Sink",
    "build_console",
    "build_sinks",
]
