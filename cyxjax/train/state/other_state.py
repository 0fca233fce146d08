"""Why a checkpoint does not go with a run, in the words of who wrote the run: what was set otherwise."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.config.compared import effect_of
from cyxjax.config.effects import ARRAYS
from cyxjax.errors import CyxjaxError, OtherStateError
from cyxjax.train.start.config_diff import other_values

_NAMED, _SHOWN = 6, 3
_HINT = (
    "HINT: set it as it was; or begin anew with its parameters: init_from: {folder}, with another folder for "
    "this run's checkpoints."
)


@contextmanager
def in_words(
    checkpointer: Checkpointer, step: int | None, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Iterator[None]:
    """A restore whose refusal of other arrays says first what was set otherwise.

    config and inputs: of this run, as its own checkpoints say them. Raises: OtherStateError.
    """
    try:
        yield
    except OtherStateError as error:
        text = _told(error.unlike, _meta(checkpointer, step), config, inputs)
        hint = _HINT.format(folder=checkpointer.directory)
        raise OtherStateError(f"{text} {hint}", error.unlike) from None


def _meta(checkpointer: Checkpointer, step: int | None) -> Mapping[str, Any]:
    """What the step says of itself; {} where it cannot be read."""
    with suppress(CyxjaxError, OSError, ValueError):
        newest = max(list_steps(checkpointer.directory)) if step is None else step
        return read_manifest(step_folder(checkpointer.directory, newest)).meta
    return {}


def _told(
    unlike: Mapping[str, str], meta: Mapping[str, Any], config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> str:
    other = _other_settings(meta.get("config", {}), config)
    then = meta.get("inputs", inputs)
    if then != inputs:
        other.insert(0, f"a sample was {_sample(then)}, is {_sample(inputs)}")
    what = "; ".join(other[:_NAMED]) or _part(unlike)
    first = sorted(unlike, key=lambda name: (not name.startswith(("params/", "model_state/")), name))
    shown = "; ".join(f"{name} {unlike[name]}" for name in first[:_SHOWN])
    more = f"; and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
    return f"the checkpoint is of another run than this: {what} ({shown}{more})."


def _other_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`comm was 'mean', is 'bf16'`, of what the arrays hang on; another number as the rate is none of it."""
    other = {key: told for key, *told in other_values(then, now, later=True)} if then else {}
    if "optimizer.name" in other:  # of another rule all else is another
        other = {key: told for key, told in other.items() if not _is_number_of_a_rule(key)}
    elif "not given" not in other.get("optimizer.lr", ()):
        other.pop("optimizer.lr", None)
    return [
        f"{key} was {was}, is {now_is}" for key, (was, now_is) in other.items() if effect_of(key) in ARRAYS
    ]


def _is_number_of_a_rule(key: str) -> bool:
    return key.startswith("optimizer.") and key != "optimizer.name"


def _sample(inputs: Mapping[str, Any]) -> str:
    leaves = [f"{name} {kind}{shape}".strip() for name, (shape, kind) in inputs.items()]
    return ", ".join(leaves) or "nothing"


def _part(unlike: Mapping[str, str]) -> str:
    """Which part of the program is another one, as far as the names of arrays say."""
    if any(name.startswith("params/") for name in unlike):
        return "the model's parameters are others"
    if any(name.startswith("model_state/") for name in unlike):
        return "what the model keeps beside its parameters is something else"
    return "the optimizer is another, or what callbacks and the precision add to its state"
