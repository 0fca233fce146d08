"""The reasons why training ended: one table for the loop, the history and the messages."""

from typing import NamedTuple

from cyxjax.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED

_APART = 2.0**-20  # exact in float32, and the sum over a million replicas is below 1


class StopReason(NamedTuple):
    """One reason to stop. name: in the history. note: after "stopped by". hint: how to continue training."""

    name: str
    note: str
    hint: str
    exit_code: int = EXIT_OK

    @property
    def sent(self) -> float:
        """The value that a rank sends: the sum over replicas still shows the strongest reason."""
        return _APART ** _REQUESTS.index(self)


SIGNAL = StopReason("signal", "a signal", "the same command continues the run", EXIT_PREEMPTED)
INTERRUPT = StopReason("interrupt", "Ctrl-C", "the same command continues the run", EXIT_INTERRUPT)
MAX_TIME = StopReason("max_time", "max_time", "the same command continues the run")
CALLBACK = StopReason(
    "callback", "a callback", "the same command continues the run, unless a callback stops it again"
)
EARLY_STOPPING = StopReason(
    "early_stopping",
    "early stopping",
    "the same command with more patience of early stopping continues the run",
)
MAX_STEPS = StopReason("max_steps", "max_steps", "the same command with more --max-steps continues the run")
EPOCHS = StopReason("", "epochs", "the same command with more --epochs continues the run")

# Sent with a step by the ranks that know of them, strongest first; every rank knows of the others itself.
_REQUESTS = (SIGNAL, INTERRUPT, MAX_TIME, CALLBACK)
# All constants above.
REASONS = {reason.name: reason for reason in list(globals().values()) if isinstance(reason, StopReason)}


def reason_of(name: str) -> StopReason:
    """The reason with this name in a history; an unknown name gives a reason of this name."""
    return REASONS.get(name, StopReason(name, name, EPOCHS.hint))


def strongest(sent: float) -> StopReason:
    """The strongest reason in `sent`, the sum over replicas of what ranks sent, which is above 0."""
    return next((reason for reason in _REQUESTS if sent >= reason.sent), _REQUESTS[-1])
