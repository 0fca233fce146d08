"""Checks the learning rates of a run before the first step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.mesh import on_host
from cyxjax.errors import ConfigError
from cyxjax.train.schedules import RatesAsFactor, Schedule


def _refuse_rates_as_factors(own: Schedule, lr: Any, num_steps: int | None) -> None:
    """Raises: ConfigError for a user's schedule whose values look like learning rates, not factors.

    A factor starts or peaks at about 1: all its values below 0.1, or at or below the learning rate itself,
    would make a rate nobody means, 1e-6 of Adam(1e-3) and a schedule that starts at 1e-3.
    """
    largest = float(_asked(own, _some_steps(num_steps)).max())
    if 0 < largest < 0.1 or (isinstance(lr, int | float) and 0 < largest <= lr < 1):
        raise ConfigError(
            f"schedule is at most {largest:.4g} in this run and multiplies the optimizer's learning rate. "
            "HINT: fit(..., lr_schedule=...) takes learning rates; a factor starts or peaks at 1.",
            key="schedule",
        )


def _some_steps(num_steps: int | None) -> np.ndarray:
    return np.unique(np.linspace(0, (num_steps or 2) - 1, 32).astype(np.int32))


def check_rates(lr: Any, factor: Schedule, num_steps: int | None, own: Schedule | None = None) -> str:
    """A warning where all steps of the run have the rate 0, "" where some have another.

    lr: the optimizer's, a number or a schedule, None where it is not known. num_steps: of the run, None where
    that is not known; some 30 of them are asked. own: the schedule that `fit` was given, if any.
    Raises: ConfigError for a rate that is below 0 or NaN.
    """
    if own is not None and not isinstance(own, RatesAsFactor):
        _refuse_rates_as_factors(own, lr, num_steps)
    most: list[float] = []
    last = (num_steps or 2) - 1
    steps = _some_steps(num_steps)
    rates = {"schedule": factor} | ({"learning rate": lr} if callable(lr) else {})
    for what, rate in rates.items():
        values = _asked(rate, steps)
        wrong = np.flatnonzero(~(values >= 0))
        if wrong.size:
            raise ConfigError(
                f"the {what} is {values[wrong[0]]:.4g} at step {steps[wrong[0]]}, expected 0 or more: below "
                "0 a step goes up the gradient. HINT: jnp.maximum(0.0, rate); to climb give the loss a minus."
            )
        most.append(float(values.max()))
    if min(most) > 0 or num_steps is None:
        return ""
    return (
        f"The learning rate is 0 in all steps of this run that were asked, 0 to {last}: nothing is learned. "
        "HINT: a schedule counts steps, not epochs; `//` rounds down."
    )


def _asked(rate: Schedule, steps: np.ndarray) -> np.ndarray:
    """`rate` at each of `steps`, float64; as in the compiled step it is called with an array."""
    with on_host():
        # All at once, and not jitted: each operation is compiled once in a process, for any number of fits.
        return np.asarray(jax.vmap(rate)(jnp.asarray(steps)), np.float64)
