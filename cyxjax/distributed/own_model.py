"""The object the user gave: what it and its wrapper tell each other, values and mode.

SequentialModel and nnx modules hold values of their own, and a script saves, calls and evaluates that object
as torch's do. So it holds the trained values after each update, and what is set in it holds in the wrapper:
whoever spoke last.
"""

from collections.abc import Callable
from typing import Any, Protocol

from cyxjax.core.model.adapter import is_module_of
from cyxjax.distributed.ddp_state import HeldState
from cyxjax.errors import ConfigError
from cyxjax.models.sequential import SequentialModel

PyTree = Any
Values = tuple[PyTree, PyTree]  # params, model_state


class Own(Protocol):
    """A model, as its wrapper or trainer meets it."""

    training: bool
    by_reference: bool
    """Whether it holds the very arrays it is given, which nobody may then give away."""

    def give(self, now: Callable[[], Values]) -> None:
        """It holds what `now()` says, asked at once or when it is next used."""

    def taken(self) -> Values | None:
        """What it holds, where that was set since `give`; else None."""

    def params_set(self) -> str:
        """What of its parameters was set since the last `give`, by name; "" for nothing."""


class _HoldsNothing:
    """linen modules and pairs of functions."""

    by_reference = False

    def __init__(self) -> None:
        self.training = True

    def give(self, now: Callable[[], Values]) -> None:
        del now

    def taken(self) -> Values | None:
        return None

    def params_set(self) -> str:
        return ""


class _OfSequential:
    """Values are asked for when the model is next saved, called or read."""

    by_reference = False

    def __init__(self, model: SequentialModel) -> None:
        self._model, self._layers = model, model.layers
        self._now: Callable[[], Values] | None = None

    def give(self, now: Callable[[], Values]) -> None:
        self._now = now
        self._model.follow(now)

    def taken(self) -> Values | None:
        self._refuse_layers()
        model = self._model
        same = self._now is not None and model.follows(self._now) and not model.statistics_moved
        return None if same else (model.parameters(), model.model_state())

    def params_set(self) -> str:
        self._refuse_layers()
        return "" if self._now is None or self._model.follows(self._now) else "values"

    def _refuse_layers(self) -> None:
        if self._model.layers is not self._layers:
            raise ConfigError(
                f"the model has {len(self._model.layers)} layers and had {len(self._layers)} when it was "
                "wrapped. HINT: add layers first; or wrap it anew, which keeps the values there are."
            )

    @property
    def training(self) -> bool:
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._model.train(mode)


def of(model: Any) -> Own:
    """`model`, whatever its kind."""
    if isinstance(model, SequentialModel):
        return _OfSequential(model)
    if is_module_of("flax.nnx", model):
        from cyxjax.core.model.nnx_shared import SharedVariables

        return SharedVariables(model)
    return _HoldsNothing()


class Shared:
    """A wrapper's state and the model it was made of."""

    def __init__(self, own: Own, state: HeldState, world_size: int) -> None:
        self.own, self._state, self._world_size = own, state, world_size
        self._now = state.on_one_device  # one object: it is known again

    def tell(self) -> None:
        """The model holds the state's values."""
        self.own.give(self._now)

    def meet(self) -> None:
        """What was set in the model since is the state's. Raises: ConfigError of several processes."""
        taken = self.own.taken() if self._state.exists else None
        if taken is None:
            return
        if self._world_size > 1:
            raise ConfigError(
                "values of the wrapped model were set (or its statistics moved, by a call in training mode) "
                "beside its wrapper, and whether on all ranks alike is not known. HINT: "
                "ddp.load_state_dict(saved), on all ranks; a call to look at comes after model.eval()."
            )
        self._state.set_values(*taken)
        self.tell()


class HandedOut:
    """A trainer's model, which has the trained values after each fit, and the trainer its own."""

    def __init__(self, model: Any) -> None:
        self._own = of(model)
        self.holds_values = not isinstance(self._own, _HoldsNothing)

    def tell(self, trained: Values) -> None:
        """The model holds these."""
        self._own.give(lambda: trained)

    def refuse_set(self) -> None:
        """Raises: ConfigError for parameters set in the model since, which a trainer never sees."""
        name = self._own.params_set()
        if name:
            raise ConfigError(
                f"the model's {name} was set after this trainer had trained it, and the trainer keeps values "
                "of its own. HINT: make a new trainer of the model: it begins with what the model holds."
            )
