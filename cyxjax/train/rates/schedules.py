"""How the learning rate goes: a factor on an optimizer's updates, ours, optax's by name, or any callable."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cyxjax.config.schedules import OPTAX_SCHEDULES
from cyxjax.core.objective.host import on_host
from cyxjax.errors import ConfigError
from cyxjax.plugins import checked_kinds, named
from cyxjax.train.fit_arguments import RatesAsFactor
from cyxjax.train.settings import RatePlan

Schedule = Callable[[Any], Any]
"""optimizer steps done -> factor on the learning rate"""
_OF_ONE = {"init_value": 1.0, "peak_value": 1.0, "value": 1.0}  # a factor starts, or peaks, at 1


def build_schedule(plan: RatePlan) -> Schedule:
    """Factor on the learning rate: linear warm-up to the peak, then what the plan names.

    Counted in optimizer steps only, so it does not change with the number of processes. The first step of
    a warm-up of n steps has peak / n, as in Goyal et al. 2017; step n has the peak.
    Raises: ConfigError for a schedule that cannot be made.
    """
    peak, decay_steps = plan.peak, max(plan.decay_steps, 1)
    after: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, plan.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, peak * plan.final_fraction, decay_steps),
    }
    rest = after[plan.name]() if plan.name in after else _scaled(_own(plan), peak)
    if not plan.warmup_steps:
        return rest
    warmup = optax.linear_schedule(peak / plan.warmup_steps, peak, max(plan.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, rest], [plan.warmup_steps])


def _scaled(schedule: Schedule, peak: float) -> Schedule:
    return lambda step: peak * schedule(step)


def _own(plan: RatePlan) -> Schedule:
    """A callable that was given, or what a name stands for: one of optax, or `module:attribute`."""
    if plan.own is not None:
        return plan.own
    ours = {name: getattr(optax, name) for name in OPTAX_SCHEDULES}
    found = named("schedule", plan.name, ours, key="schedule.name")
    takes = inspect.signature(found).parameters if callable(found) else {}
    if plan.name not in ours and not plan.options and len(takes) == 1:
        return found  # a schedule itself: steps -> factor
    idle = [name for name in ("transition_steps", "decay_steps") if _is_idle(plan.options.get(name))]
    if plan.name in ours and idle:
        raise ConfigError(
            f"schedule {plan.name!r} with {idle[0]}={plan.options[idle[0]]} would stay at its first value, "
            "in silence. HINT: 1 or more steps, or schedule.name: constant.",
            key="schedule.options",
        )
    options = plan.options
    if callable(found):
        options = checked_kinds(f"schedule {plan.name!r}", found, options, "schedule.options")
    implied = {name: one for name, one in _OF_ONE.items() if name in takes and plan.name in ours}
    implied |= {"init_value": 0.0} if "peak_value" in implied and "init_value" in implied else {}
    try:
        made = found(**(implied | options))
        float(made(0))
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"schedule {plan.name!r} cannot be made with options {plan.options}: {type(err).__name__}: {err} "
            f"HINT: it takes {', '.join(takes) or 'nothing'}, and gives a factor on optimizer.lr for a step.",
            key="schedule.options",
        ) from err
    return made


def _is_idle(steps: Any) -> bool:
    return isinstance(steps, int | float) and steps <= 0


def with_schedule(optimizer: optax.GradientTransformation, factor: Schedule) -> optax.GradientTransformation:
    """`optimizer` with its updates times `factor(step)`.

    A rule's update is proportional to its learning rate, so one factor serves every optax transformation.
    """
    return optax.chain(optimizer, optax.scale_by_schedule(factor))


_IN_THE_STEP = (
    "it is asked inside the compiled step, where the count is an array. "
    "HINT: jnp.where(step < 100, 1.0, 0.1) for an `if`, jnp.cos for math.cos."
)


def refuse_rates_as_factors(plan: RatePlan, lr: Any, num_steps: int | None) -> None:
    """Raises: ConfigError for a `schedule` given to fit whose values are learning rates.

    A factor starts or peaks at about 1: all its values below 0.1, or at or below the learning rate itself,
    would make a rate nobody means, 1e-6 of Adam(1e-3) and a schedule that starts at 1e-3.
    """
    if plan.own is None or isinstance(plan.own, RatesAsFactor):
        return
    largest = float(_asked("schedule", plan.own, _some_steps(num_steps)).max())
    if 0 < largest < 0.1 or (isinstance(lr, int | float) and 0 < largest <= lr < 1):
        raise ConfigError(
            f"schedule is at most {largest:.4g} in this run and multiplies the optimizer's learning rate. "
            "HINT: fit(..., lr_schedule=...) takes learning rates; a factor starts or peaks at 1.",
            key="schedule",
        )


def _some_steps(num_steps: int | None) -> np.ndarray:
    return np.unique(np.linspace(0, (num_steps or 2) - 1, 32).astype(np.int32))


def refuse_rates(lr: Any, factor: Schedule, num_steps: int | None) -> str:
    """A line to tell where all steps of the run have the rate 0, "" where some have another.

    lr: the optimizer's, a number or a schedule, None where it is not known. num_steps: of the run, None where
    that is not known; some 30 of them are asked.
    Raises: ConfigError for a rate that is below 0 or NaN, or cannot be asked for within a step.
    """
    most: list[float] = []
    last = (num_steps or 2) - 1
    steps = _some_steps(num_steps)
    rates = {"schedule": factor} | ({"learning rate": lr} if callable(lr) else {})
    for what, rate in rates.items():
        values = _asked(what, rate, steps)
        odd = np.flatnonzero(~(values >= 0))
        if odd.size:
            raise ConfigError(
                f"the {what} is {values[odd[0]]:.4g} at step {steps[odd[0]]}, expected 0 or more: below 0 "
                "a step goes up the gradient. HINT: jnp.maximum(0.0, rate); to climb give the loss a minus."
            )
        most.append(float(values.max()))
    if min(most) > 0 or num_steps is None:
        return ""
    return (
        f"The learning rate is 0 in all steps of this run that were asked, 0 to {last}: nothing is learned. "
        "HINT: a schedule counts steps, not epochs; `//` rounds down."
    )


def _asked(what: str, rate: Schedule, steps: np.ndarray) -> np.ndarray:
    """`rate` at each of `steps`, float64. Raises: ConfigError for one that is no function of an array."""
    with on_host():
        try:
            form = jax.eval_shape(lambda n: jnp.asarray(rate(n)), jax.ShapeDtypeStruct((), jnp.int32))
        except (jax.errors.JAXTypeError, TypeError, ValueError) as err:
            raise ConfigError(f"the {what} raises {type(err).__name__}: {_IN_THE_STEP}") from err
        if form.shape:
            raise ConfigError(
                f"the {what} gives shape {form.shape} for a step, expected a number. HINT: return a scalar."
            )
        return np.array([float(rate(jnp.int32(step))) for step in steps])


def told_rate(lr: Any, factor: Schedule) -> Callable[[int], float | None]:
    """Optimizer steps done -> learning rate of the last; lr: a number, a schedule, None if not known."""

    def rate(step: int) -> float | None:
        before = max(step - 1, 0)
        peak = lr(before) if callable(lr) else lr
        return None if peak is None else float(peak) * float(factor(before))

    return rate
