"""One small family of errors. Every message says what was found, what was expected, where it came
from, and ends with `HINT:` and one thing to do.

The exit codes below are what `cyxjax.train` and `cyxjax.launch` end with. `TABLE` lists errors of other
libraries and of the system that have one known cause, with a message that names it; rows are tried in order.
`translated` is a block around calls that raise them; the `cyxjax` command looks up OSError and OverflowError.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

EXIT_OK = 0
EXIT_USER_ERROR = 1  # an exception in the training program
EXIT_CONFIG = 2  # bad configuration, environment or argument; nothing was written
EXIT_INFRASTRUCTURE = 3  # the restart budget is spent, a signal killed a rank, or the group could not form
EXIT_SECONDARY = 75  # this rank failed only because a peer failed first
EXIT_HANG = 124  # the watchdog ended a run that made no progress
EXIT_INTERRUPT = 130  # Ctrl-C
EXIT_PREEMPTED = 143  # SIGTERM, after a good save: rerun the same command to continue


class CyxjaxError(Exception):
    """Base of all errors raised on purpose by cyxjax."""


class ConfigError(CyxjaxError, ValueError):
    """A bad configuration value, environment variable or argument. Ends a command with exit code 2.

    key: the configuration key that the error is about; "" if there is none, or it is not known.
    """

    def __init__(self, *text: object, key: str = "") -> None:
        super().__init__(*text)
        self.key = key


class DataError(CyxjaxError, ValueError):
    """Data that cannot be trained on: wrong shape, label out of range, empty, unreadable."""


class GroupError(CyxjaxError, RuntimeError):
    """The group of processes: not initialized, a peer missing, a backend not available."""


class DesyncError(GroupError):
    """Ranks that should agree do not: they have different programs, shapes or parameters."""


class SpawnError(GroupError):
    """A spawned process failed; the text holds its traceback. `rank` is its rank."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class CheckpointError(CyxjaxError, RuntimeError):
    """A checkpoint that is missing, damaged, locked by another job, or of another model."""


class DamagedStep(CheckpointError):
    """A checkpoint step whose files do not verify or cannot be read."""


class OtherStateError(CheckpointError):
    """A checkpoint whose arrays are not those expected. unlike: the problem with each, by its name."""

    def __init__(self, text: str, unlike: Mapping[str, str]) -> None:
        super().__init__(text)
        self.unlike = dict(unlike)


class NotSavedError(CheckpointError):
    """Training is over and its parameters are in memory, but the final state could not be saved."""


class OutOfMemoryError(CyxjaxError, RuntimeError):
    """The step needs more memory than the device has."""


class BadStepError(CyxjaxError, RuntimeError):
    """Training should not continue from the step that led to `position` (cyxjax.train.hooks.hook.Position).

    good_step: the newest step whose state is sound, as far as is known. brief: what happened, in a clause.
    """

    def __init__(self, text: str, position: Any, good_step: int, brief: str) -> None:
        super().__init__(text)
        self.position, self.good_step, self.brief = position, good_step, brief


class NonFiniteError(BadStepError):
    """The loss or the gradients became NaN or infinite in the step that led to `position`."""

    def __init__(self, text: str, position: Any) -> None:
        # Where it is of use to go back, such steps are left out: every state that was saved is sound.
        super().__init__(text, position, position.step, f"step {position.step} was not finite")


class LossSpikeError(BadStepError):
    """The loss was far above its median for some steps in a row, the last of which led to `position`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` for the closest of `known` names, else the list of what is known."""
    names = sorted(known)
    if not names:
        return "There is none."
    close = difflib.get_close_matches(name, names, 1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."


class Known(NamedTuple):
    """kind: the name of the exception's class or of one it inherits from. pattern: of its whole text.

    line: what we raise in its place; {0}, {1} are the groups of the pattern.
    """

    kind: str
    pattern: str
    line: str
    error: type[CyxjaxError] = ConfigError


TABLE = (
    Known(
        "OSError",
        r"\[Errno (?:23|24)\] (.*)",
        "{0}: this process has reached the system's limit of open files. HINT: `ulimit -n 4096`.",
    ),
    Known(
        "OSError",
        r"\[Errno (?:11|12)\] (.*)",
        "{0}: the system's limit of processes, threads or memory is reached. HINT: start fewer processes, or "
        "raise the limit that `ulimit -a` shows (-u, -v).",
    ),
    Known(
        "RuntimeError",
        r"can't start new thread",
        "the system starts no more threads for this process. HINT: raise the limit that `ulimit -a` shows "
        "(-v of memory, -u of threads).",
    ),
    Known(
        "MemoryError", r"", "no more memory for this process. HINT: raise the limit that `ulimit -v` shows."
    ),
    Known(
        "FileNotFoundError",  # of os.getcwd(): any other names a file
        r"\[Errno 2\] No such file or directory",
        "the working folder of this process was deleted. HINT: `cd` to a folder that exists.",
    ),
    Known(
        "RuntimeError",
        r"Unable to initialize backend '(\w+)': (.*?)\.? \(set JAX_PLATFORMS.*",
        "JAX_PLATFORMS names {0!r}, which jax cannot start here: {1}. HINT: unset it, or set it to cpu.",
    ),
    Known(
        "JaxRuntimeError",
        r"RESOURCE_EXHAUSTED:? ?([^\n]{1,300}).*",
        "{0}. HINT: a smaller batch_size; or the same samples in smaller parts, batch_size: 1/2 with "
        "gradient_accumulation_steps: 2; or remat: full; or precision: bfloat16.",
        OutOfMemoryError,
    ),
    Known(
        "ValueError",  # of jax, when a program is lowered
        r"The precision '(F16\w*)' is not supported by dot_general on (\w+).*",
        "float16: the model needs matrix products ({0}) that {1} does not support. "
        "HINT: set precision: bfloat16.",
    ),
    Known(
        "ValueError",  # of flax.linen.merge_param
        r'Parameter "(\w+)" must be passed to the constructor or at call time.*',
        "a layer of the model needs {0}. HINT: give the model's __call__ an argument `train`, which the "
        "trainer sets, and the layer {0}=not train.",
    ),
    Known(
        "TypeError",  # of a layer that has no default for it: flax.linen.SpectralNorm
        r"(.*)\.__call__\(\) missing 1 required keyword-only argument: 'update_stats'",
        "{0} needs update_stats. HINT: give the model's __call__ an argument `train`, which the trainer "
        "sets, and the layer update_stats=train.",
    ),
    Known(
        "ScopeParamNotFoundError",  # of flax
        r'Could not find parameter named "(\w+)" in scope "([^"]*)".*',
        "the values given with the model have no parameter {0!r} in {1}. HINT: pass the variables that this "
        "module's init returned, or the module alone.",
    ),
    Known(
        "ScopeParamShapeError",  # of flax
        r'For parameter "(\w+)" in "([^"]*)", the given initializer is expected to generate shape (\(.*?\)), '
        r"but the existing parameter it received has shape (\(.*?\)).*",
        "parameter {0!r} in {1} has shape {3}, but the module and its inputs need {2}. HINT: pass inputs "
        "of the width that the parameters were made for.",
    ),
    Known(
        "ModifyScopeVariableError",  # of flax
        r'Cannot update variable "(\w+)" in "/?([^"]*)" because collection "batch_stats".*',
        "the model changes {0!r} of 'batch_stats' in evaluation, in /{1}. HINT: use_running_average=not "
        "train, with an argument `train` of the model's __call__, which the trainer sets.",
    ),
    Known(
        "ModifyScopeVariableError",
        r'Cannot update variable "(\w+)" in "/?([^"]*)" because collection "(\w+)".*',
        "the model changes {0!r} of {2!r} in evaluation, in /{1}. HINT: change it `if train:`, with an "
        "argument `train` of the model's __call__, which the trainer sets.",
    ),
)
# Other errors of the system, mostly about files: for commands, which show no traceback.
_OF_THE_SYSTEM = (
    Known("OSError", r"\[Errno (?:28|122)\] (.*)", "{0}. HINT: free space there, then run it again."),
    Known("OSError", r"(?:\[Errno -?\d+\] )?(.*)", "{0}. HINT: check path and permissions."),
    Known("OverflowError", r"(.*)", "a number is too large: {0}. HINT: give a smaller one."),
)


def known(error: BaseException, *, system: bool = False) -> CyxjaxError | None:
    """Our error for `error`; None if it is not in the table. system: also for other errors of the system."""
    kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    for row in TABLE + _OF_THE_SYSTEM * system:
        found = row.kind in kinds and re.fullmatch(row.pattern, text, re.DOTALL)
        if found:
            return row.error(row.line.format(*found.groups()))
    return None


@contextmanager
def translated(kind: type[CyxjaxError] = CyxjaxError) -> Iterator[None]:
    """A block whose known errors are raised as ours, if that is a `kind`. Raises: the error of the row."""
    try:
        yield
    except Exception as error:
        ours = known(error)
        if not isinstance(ours, kind):
            raise
        raise ours from error
