"""One small family of errors. Every message says what was found, what was expected, where it came
from, and ends with `HINT:` and one thing to do.

The exit codes below are what `cyxjax.train` and `cyxjax.launch` end with.
"""

import difflib
from collections.abc import Iterable, Mapping

EXIT_OK = 0
EXIT_USER_ERROR = 1  # an exception in the training program
EXIT_CONFIG = 2  # bad configuration, environment or argument; nothing was written
EXIT_INFRASTRUCTURE = 3  # the restart budget is spent
EXIT_SECONDARY = 75  # this rank failed only because a peer failed first
EXIT_HANG = 124  # the watchdog ended a run that made no progress
EXIT_INTERRUPT = 130  # Ctrl-C
EXIT_PREEMPTED = 143  # SIGTERM, after a good save: rerun the same command to go on


class CyxjaxError(Exception):
    """Base of all errors raised on purpose by cyxjax."""


class ConfigError(CyxjaxError, ValueError):
    """A bad configuration value, environment variable or argument. Ends a command with exit code 2.

    key: the key of the configuration that it is about, as far as who raises it knows; "" for none.
    """

    def __init__(self, *text: object, key: str = "") -> None:
        super().__init__(*text)
        self.key = key


class DataError(CyxjaxError, ValueError):
    """Data that cannot be trained on: wrong shape, label out of range, empty, unreadable."""


class GroupError(CyxjaxError, RuntimeError):
    """The group of processes: not initialized, a peer missing, a backend that is not there."""


class DesyncError(GroupError):
    """Ranks that should agree do not: other program, other shapes, other parameters."""


class CheckpointError(CyxjaxError, RuntimeError):
    """A checkpoint that is missing, damaged, locked by another job, or of another model."""


class DamagedStep(CheckpointError):
    """A checkpoint step whose files do not verify or cannot be read."""


class OtherStateError(CheckpointError):
    """A checkpoint that holds other arrays than are wanted. unlike: what is the matter with each, by name."""

    def __init__(self, text: str, unlike: Mapping[str, str]) -> None:
        super().__init__(text)
        self.unlike = dict(unlike)


class NotSavedError(CheckpointError):
    """Training is over, its parameters are in memory, and the final state is on no disk."""


class GivenOnce:
    """What an object was given when it was made, and is set later, would change nothing: it is refused."""

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self)
        # Of our own classes alone: what a subclass of the user's keeps under that name is its own.
        if GivenOnce in kind.__bases__ and not hasattr(kind, name) and name in _given_to(kind):
            raise ConfigError(
                f"{kind.__name__}.{name} was set after it was made, which would change nothing. "
                f"HINT: {kind.__name__}(..., {name}=...)."
            )
        super().__setattr__(name, value)


def _given_to(kind: type) -> tuple[str, ...]:
    code = vars(kind)["__init__"].__code__
    return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` for the closest of `known` names, else the list of what is known."""
    names = sorted(known)
    if not names:
        return "There is none."
    close = difflib.get_close_matches(name, names, 1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."
