"""An optax transformation that knows its learning rate and the model it updates."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import optax

from cyxjax.errors import ConfigError

Rate = float | Callable[[Any], Any]
"""A learning rate, or a schedule: optimizer steps done -> learning rate (optax's, or your own)."""


class Optimizer(optax.GradientTransformation):
    """An optax transformation with `lr`, its peak learning rate. Any optax transformation does as well."""

    made_with: Mapping[str, Any] = MappingProxyType({})  # the name of what made it, and what that was given
    remade: Callable[..., Any] | None = None  # (lr=, weight_decay=) -> the same with other numbers
    is_frozen: Callable[[str], bool] | None = None  # name of a parameter -> whether it is not trained
    ddp: Any = None  # the wrapped model whose parameters it was given, as torch's are
    made_lr: Any = None  # what it was made with: a number, a schedule, or None where it is not known
    is_compiled: bool = False  # a trainer has it, whose step holds its rate
    at_rate: Any = None  # the same made again, for a trainer, with the rate that was set before
    _lr: Any = None

    @property
    def lr(self) -> Any:
        """The learning rate: a number, a schedule, or None where it is not known.

        Set to another number it holds from the next `step()` on (0: nothing moves), for a loop written by
        hand; all ranks set it alike. Raises: ConfigError where it could not hold, naming what does.
        """
        return self._lr

    @lr.setter
    def lr(self, lr: Any) -> None:
        if self.is_compiled:
            raise ConfigError(
                f"lr={lr!r} is set of an optimizer that a trainer has, whose step is compiled with "
                f"{self._lr}. HINT: fit(..., schedule=lambda step: 0.9 ** (step // 100)), factors of it by "
                "step, or callbacks=[cx.ReduceLROnPlateau()]."
            )
        if isinstance(self.made_lr, bool) or not isinstance(self.made_lr, int | float):
            made = "a schedule, which says it for each step" if callable(self.made_lr) else "not known"
            raise ConfigError(
                f"lr={lr!r} is set, and this optimizer's rate is {made}. HINT: make it with a number, "
                "cx.SGDOptimizer(0.1), and set that."
            )
        try:
            rate = float(lr)
        except (TypeError, ValueError):
            rate = math.nan
        if isinstance(lr, bool) or not 0 <= rate < math.inf:
            raise ConfigError(f"lr={lr!r}: expected a number, 0 or more. HINT: optimizer.lr *= 0.5.")
        self._lr = rate

    @property
    def rate_factor(self) -> float:
        """What an update is multiplied by, since `lr` was set: 1 where it was not."""
        return 1.0 if self._lr is self.made_lr else self._lr / self.made_lr

    def step(self) -> None:
        """`ddp.update_parameters(self)` of the ddp it was made with. Raises: ConfigError without one."""
        self._bound("update_parameters(optimizer)").update_parameters(self)

    def zero_grad(self) -> None:
        """`ddp.zero_grad()`, likewise."""
        self._bound("zero_grad()").zero_grad()

    def _bound(self, call: str) -> Any:
        if self.ddp is None:
            raise ConfigError(
                f"this optimizer has no model to update. HINT: ddp.{call}, or make it with "
                "them: cx.AdamOptimizer(ddp, lr=0.001)."
            )
        return self.ddp


def named_rate(transformation: optax.GradientTransformation, lr: Any) -> Optimizer:
    """`transformation`, made with the rate `lr`."""
    optimizer = Optimizer(transformation.init, transformation.update)
    optimizer.made_lr = optimizer._lr = lr
    return optimizer


def for_trainer(optimizer: Any) -> Any:
    """`optimizer` at the rate that was set, the same at each call, and its `lr` fixed; others as they are.

    Raises: ConfigError where it cannot be made again with that rate.
    """
    if not isinstance(optimizer, Optimizer):
        return optimizer
    if not optimizer.is_compiled and optimizer.rate_factor != 1.0:
        if optimizer.remade is None:
            raise ConfigError(
                f"lr was set to {optimizer.lr} of an optimizer made with {optimizer.made_lr} that cannot be "
                "made again. HINT: make it with the rate it should have."
            )
        optimizer.at_rate = optimizer.remade(lr=optimizer.lr)
    optimizer.is_compiled = True
    return optimizer.at_rate or optimizer
