"""What flax raises for a layer that does not get the train/eval flag, as one line that names the flag."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from flax.errors import ModifyScopeVariableError

from cyxjax.errors import ConfigError

_NOT_PASSED = re.compile(r'Parameter "(\w+)" must be passed to the constructor or at call time')
_CHANGED = re.compile(r'Cannot update variable "(\w+)" in "/?([^"]*)" because collection "(\w+)"')


@contextmanager
def explained() -> Iterator[None]:
    """Raises: ConfigError for a layer without the flag, and for variables that change in evaluation."""
    try:
        yield
    except ValueError as err:
        if (found := _NOT_PASSED.search(str(err))) is None:
            raise
        raise ConfigError(
            f"a layer of the model needs {found[1]}. HINT: give the model's __call__ an argument `train`, "
            f"which the trainer sets, and the layer {found[1]}=not train."
        ) from err
    except ModifyScopeVariableError as err:
        if (found := _CHANGED.search(str(err))) is None:
            raise
        variable, path, collection = found.groups()
        way = "use_running_average=not train" if collection == "batch_stats" else "change it `if train:`"
        raise ConfigError(
            f"the model's {path or '__call__'} changes {variable!r} of {collection!r} in evaluation. HINT: "
            f"{way}, with an argument `train` of the model's __call__, which the trainer sets."
        ) from err
