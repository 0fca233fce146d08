"""How the learning rate goes: a factor on an optimizer's updates, ours, optax's by name, or any callable."""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from cyxjax.config.schedules import OPTAX_SCHEDULES
from cyxjax.errors import ConfigError
from cyxjax.plugins import checked_kinds, named
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


def told_rate(lr: Any, factor: Schedule) -> Callable[[int], float | None]:
    """Optimizer steps done -> learning rate of the last; lr: a number, a schedule, None if not known."""

    def rate(step: int) -> float | None:
        before = max(step - 1, 0)
        peak = lr(before) if callable(lr) else lr
        return None if peak is None else float(peak) * float(factor(before))

    return rate
