"""The combined effect of a trainer's callbacks: on the optimizer, on evaluation, on the learning rate."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cyxjax.core.mesh import REPLICATED
from cyxjax.core.optimizer import with_learning_rate_factor
from cyxjax.core.step import TrainState
from cyxjax.core.strategy import Sync
from cyxjax.data.streams import packed, unpacked
from cyxjax.errors import ConfigError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.hooks.callbacks import EMA, Callback, Optimizer, RunParts
from cyxjax.train.hooks.hook import Hook, overriding
from cyxjax.train.monitor import Watchable

STATES = "hooks"  # a checkpoint's metadata: states of hooks


def around(hooks: Iterable[Hook], optimizer: Optimizer) -> Optimizer:
    """`optimizer` with the parts of all callbacks; averages come outermost, to see final updates."""
    found, rated = _callbacks(hooks), _that_change_the_rate(hooks)
    for callback in sorted(found, key=lambda one: isinstance(one, EMA)):
        if callback in rated[:1]:
            optimizer = with_learning_rate_factor(optimizer)
        optimizer = callback.around(optimizer)
    return optimizer


def in_the_step(hooks: Iterable[Hook]) -> list[Callback]:
    """The callbacks that add a part to the optimizer and its state."""
    return [
        one
        for one in _callbacks(hooks)
        if one.changes_learning_rate or type(one).around is not Callback.around
    ]


def evaluated(hooks: Iterable[Hook], state: TrainState) -> TrainState:
    """The state that evaluation sees, given a state that all replicas agree on."""
    for callback in _callbacks(hooks):
        state = callback.evaluated(state)
    return state


def learning_rate_factor(hooks: Iterable[Hook]) -> float:
    """The factor of callbacks on the learning rate; 1 if none changes it."""
    found = _that_change_the_rate(hooks)
    return found[-1].learning_rate_factor() if found else 1.0  # the last one sees what the others set


def begin(hooks: Iterable[Hook], run: RunParts) -> None:
    """Calls `begin` of all callbacks, which have then been checked: also those that the run itself made."""
    check_watched(hooks, run.watchable)
    for callback in _callbacks(hooks):
        callback.begin(run)


def states(hooks: Iterable[Hook]) -> dict[str, Any]:
    """What a checkpoint keeps of `hooks`, as JSON. Raises: ConfigError for a state that it cannot hold."""
    found = {name: packed([hook.state_dict()]) for name, hook in _with_states(hooks)}
    for name, state in found.items():
        if state is None:
            raise ConfigError(
                f"{name}.state_dict returned an object that a checkpoint cannot hold. HINT: return JSON "
                "values, tuples, bytes and NumPy arrays."
            )
    return found


def load_states(hooks: Iterable[Hook], stored: Mapping[str, Any]) -> None:
    """Gives `hooks` what `states` returned for a checkpoint."""
    for name, hook in _with_states(hooks):
        state = unpacked(stored[name])[0] if name in stored else None
        if state is not None:
            hook.load_state_dict(state)


def _with_states(hooks: Iterable[Hook]) -> list[tuple[str, Hook]]:
    """(name, hook) of those that have a state; several of a class are numbered."""
    found, count = [], Counter[str]()
    for hook in overriding(hooks, "state_dict"):
        name = type(hook).__name__
        found.append((f"{name}.{count[name]}" if count[name] else name, hook))
        count[name] += 1
    return found


def check_state_is_whole(hooks: Iterable[Hook], sync: Sync) -> None:
    """Raises: ConfigError for a callback of the user that changes the state where a strategy keeps parameters
    in parts, whose shapes and values are not those of the model.
    """
    for hook in overriding(hooks, "next_state"):
        if sync.params_spec != REPLICATED and not type(hook).__module__.startswith("cyxjax."):
            raise ConfigError(
                f"{type(hook).__name__}.next_state changes the parameters, and this strategy keeps parts of "
                "them on the replicas. HINT: use comm='mean' or 'zero1', which keep them whole.",
                key="comm",
            )


def check_watched(hooks: Iterable[Hook], watchable: Watchable) -> None:
    """Raises: ConfigError for a callback that monitors what the run does not measure."""
    for callback in _callbacks(hooks):
        callback.check(watchable)


def checked(hooks: Iterable[Any]) -> list[Hook]:
    """`hooks` as a list. Raises: ConfigError for an object that is not a hook."""
    found = list(hooks)
    for one in found:
        if not isinstance(one, Hook):
            given = one.__name__ if isinstance(one, type) else type(one).__name__
            raise ConfigError(
                f"callbacks hold {given}, expected objects of cyxjax.train.hooks.hook.Hook. "
                "HINT: pass the object and not its class: callbacks=[EarlyStopping(patience=3)]."
            )
        _warn_of_other_methods(one, Callback if isinstance(one, Callback) else Hook)
    return found


def _warn_of_other_methods(hook: Hook, known: type) -> None:
    """Prints a line for each on_... method of `hook` that cyxjax does not call. known: Hook or Callback."""
    called = [name for name in dir(known) if name.startswith("on_")]
    for name in sorted(set(dir(hook)) - set(dir(known))):
        if name.startswith("on_") and callable(getattr(type(hook), name, None)):
            warn_on_stderr(
                f"the callback {type(hook).__name__} has a method {name}, which cyxjax does not call. "
                f"HINT: use one of {', '.join(called)}."
            )


def _callbacks(hooks: Iterable[Hook]) -> list[Callback]:
    return [one for one in hooks if isinstance(one, Callback)]


def _that_change_the_rate(hooks: Iterable[Hook]) -> list[Callback]:
    return [one for one in _callbacks(hooks) if one.changes_learning_rate]
