"""Errors of other libraries and of the system that have one known cause, and the line that says it.

One table for the whole package: its rows are tried in order, on the exception's class and text. `translated`
is the block around a call that raises them; our commands look here for what nobody has translated.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cyxjax.errors import ConfigError, CyxjaxError


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


def known(error: BaseException) -> CyxjaxError | None:
    """Our error for `error`; None for one that is not in the table."""
    kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
    for row in TABLE:
        found = row.kind in kinds and re.fullmatch(row.pattern, text, re.DOTALL)
        if found:
            return row.error(row.line.format(*found.groups()))
    return None


@contextmanager
def translated() -> Iterator[None]:
    """A block whose known errors are raised as ours. Raises: the error of the row."""
    try:
        yield
    except Exception as error:
        ours = known(error)
        if ours is None:
            raise
        raise ours from error
