"""What the layers of a linen module make of its mode, in words of ours: whether its Dropout follows it, and
what Flax raises for a layer that was not told."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen
from flax.errors import ModifyScopeVariableError

from cyxjax.errors import ConfigError

_NOT_TOLD = re.compile(r'Parameter "(\w+)" must be passed to the constructor or at call time')
_CHANGED = re.compile(r'Cannot update variable "(\w+)" in "/?([^"]*)" because collection "(\w+)"')
_SAYS_SO = {"use_running_average": "BatchNorm", "deterministic": "Dropout or attention"}

Drops = dict[str, bool]
"""Path of a Dropout or attention whose rate is above 0, or of what draws from "dropout" -> whether it drew"""


@contextmanager
def explained() -> Iterator[None]:
    """What Flax raises for a layer that does not know the mode, in a line. Raises: ConfigError."""
    try:
        yield
    except ValueError as err:
        if (found := _NOT_TOLD.search(str(err))) is None:
            raise
        name = found[1]
        raise ConfigError(
            f"a layer of the model ({_SAYS_SO.get(name, 'one of its own')}) is not told {name}. "
            f"HINT: give the model's __call__ an argument `train`, which the trainer sets, and the layer "
            f"{name}=not train."
        ) from err
    except ModifyScopeVariableError as err:
        if (found := _CHANGED.search(str(err))) is None:
            raise
        variable, path, collection = found.groups()
        statistics = collection == "batch_stats"
        what = "uses the batch's statistics" if statistics else f"changes its {variable!r} of {collection!r}"
        way = "use_running_average=not train" if statistics else "change it `if train:`"
        raise ConfigError(
            f"the model's {path or 'own call'} {what} in evaluation, where nothing changes. HINT: {way}, by "
            "an argument `train` of the model's __call__, which the trainer sets."
        ) from err


@contextmanager
def noting_drops(found: Drops) -> Iterator[None]:
    """Notes what each Dropout does that is called, and what else draws from the stream of that name."""
    make_rng = linen.Module.make_rng

    def drawn(self: linen.Module, name: str = "params") -> Any:
        if name == "dropout":
            found[_path(self)] = True
        return make_rng(self, name)

    def note(next_fun: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        module = context.module
        if isinstance(module, linen.Dropout) and context.method_name == "__call__":
            given = kwargs.get("deterministic", args[1] if len(args) > 1 else None)
            is_off = module.deterministic if given is None else given
            if isinstance(module.rate, int | float) and module.rate > 0 and isinstance(is_off, bool | int):
                found[_path(module)] = not is_off
        attends = isinstance(module, linen.MultiHeadDotProductAttention) and module.dropout_rate > 0
        if attends and context.method_name == "__call__":
            found.setdefault(_path(module), False)
        return next_fun(*args, **kwargs)

    linen.Module.make_rng = drawn  # type: ignore[method-assign]
    try:
        with linen.intercept_methods(note):
            yield
    finally:
        linen.Module.make_rng = make_rng  # type: ignore[method-assign]


def _path(module: linen.Module) -> str:
    return "/".join(module.path) or "own call"


def told(in_evaluation: Drops, in_training: Drops) -> list[str]:
    """A line for Dropout that drops in evaluation, and one for Dropout that does not in training."""
    always = [path for path, drops in in_evaluation.items() if drops]
    never = [path for path, drops in in_training.items() if not drops]
    way = (
        "HINT: give the model's own __call__ an argument `train`, which the trainer sets (it sets no "
        "**kwargs and no layer's), and the layer deterministic=not train."
    )
    lines = [(always, "drops values in evaluation, too, always the same ones")]
    lines += [(never, "drops nothing in training, too")]
    said = "nothing tells it the mode"
    return [f"The model's {_some(paths)} {what}: {said}. {way}" for paths, what in lines if paths]


def _some(paths: list[str]) -> str:
    return paths[0] + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "")
