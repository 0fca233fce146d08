"""The learning rate over a run: a factor on an optimizer's updates, resolved from the configuration and the
length of the run. Schedules are our own, optax's by name, or any callable.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.sections import OPTAX_SCHEDULES, SCHEDULES, ScheduleConfig
from cyxjax.data.batches import BatchPlan
from cyxjax.errors import ConfigError
from cyxjax.plugins import called, checked_options, named

Schedule = Callable[[Any], Any]
"""optimizer steps done -> factor on the learning rate"""
WARMUP_EPOCHS = "warmup_epochs"  # in the metadata of a checkpoint
_OF_ONE = {"init_value": 1.0, "peak_value": 1.0, "value": 1.0}  # a factor starts, or peaks, at 1


class RatePlan(NamedTuple):
    """The factor on the learning rate: warm-up to `peak`, then a decay, counted in optimizer steps."""

    name: str = "constant"
    peak: float = 1.0
    warmup_steps: int = 0
    decay_steps: int = 0  # of a decay, at least 1; 0 if nothing decays
    final_fraction: float = 0.0
    options: dict[str, Any] = {}  # of a schedule given by its name
    own: Callable[[Any], Any] | None = None  # a schedule that was given: steps -> factor
    decay_begins: int = 0  # step; other than warmup_steps, even below 0, after a change of the batch size
    warmup_epochs: float | None = None  # trained when the warm-up ends, if a decay ends with the epochs


class Resumed(NamedTuple):
    """Where a resumed run goes on: steps of its optimizer, whole epochs, and samples of the current epoch."""

    steps: int
    epochs: int
    samples: int
    warmup_epochs: float | None = None  # see `RatePlan`

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Resumed | None":
        """Where a run goes on from a checkpoint with this metadata; None if it holds no position."""
        at = meta.get("position")
        return at and cls(
            int(at["step"]) - int(meta.get("first_step", 0)),
            int(at["epoch"]),
            int(at["samples"]),
            meta.get(WARMUP_EPOCHS),
        )

    def moved(self, epoch: BatchPlan) -> int:
        """Steps that the epochs so far would have with the batches of `epoch`, less those that they had."""
        rest = epoch.rest(self.samples).num_steps
        return (self.epochs + 1) * epoch.num_steps - rest - self.steps


class RatesAsFactor(NamedTuple):
    """A schedule of learning rates as factors on the optimizer's rate."""

    rates: Callable[[Any], Any]
    lr: float

    def __call__(self, step: Any) -> Any:
        return self.rates(step) / self.lr


def schedule_of(schedule: Any, lr_schedule: Any, optimizer: Any) -> Any:
    """The factor on the optimizer's learning rate: `schedule` gives factors, `lr_schedule` gives rates.

    Raises: ConfigError if both are given, or if the optimizer's own rate is not a number, or 0.
    """
    if lr_schedule is None:
        return schedule
    lr = getattr(optimizer, "lr", None)
    if schedule is not None or not isinstance(lr, int | float) or lr == 0:
        raise ConfigError(
            "lr_schedule replaces `schedule` and needs an optimizer with a rate that is a number, not 0, "
            f"got {lr!r}. "
            "HINT: cx.AdamOptimizer(0.001), or give the schedule to the optimizer: optax.adam(schedule).",
            key="lr_schedule",
        )
    return RatesAsFactor(lr_schedule, float(lr))


def rate_plan(
    config: DistributedTrainingConfig,
    section: Any,
    global_batch_size: int,
    steps_per_epoch: int,
    moved: int = 0,
    warmup_epochs: float | None = None,
) -> RatePlan:
    """The plan of the rate from scaling rule, warm-up and decay.

    section: a ScheduleConfig, a function (steps -> factor), or None for a constant rate.
    moved: steps that the epochs so far would have had at this batch size, less the steps that they had.
    warmup_epochs: epochs trained when the warm-up ended, at any batch sizes; None if it is not over.
    Raises: ConfigError for a decay over an unknown number of steps, and for `options` of one of our own
        schedules, which are set by keys.
    """
    peak = scaling_factor(config.lr_scaling, global_batch_size, config.base_batch_size)
    if section is None:
        return RatePlan("constant", peak, config.warmup_steps)
    if not isinstance(section, ScheduleConfig):
        return RatePlan("own", peak, config.warmup_steps, own=section)
    if section.name not in SCHEDULES:
        return RatePlan(section.name, peak, config.warmup_steps, options=copy.deepcopy(section.options))
    checked_options(f"schedule {section.name!r}", lambda: None, section.options, "schedule.options")
    if section.name == "constant":
        return RatePlan("constant", peak, config.warmup_steps)
    most, planned = config.max_steps, steps_per_epoch * config.epochs
    if not most and not planned and not section.decay_steps:
        raise ConfigError(
            f"schedule.name={section.name}: the number of steps to decay over is not known for a loader. "
            "HINT: set schedule.decay_steps or max_steps (for a stream, steps_per_epoch)."
        )
    begins, steps = config.warmup_steps, section.decay_steps
    if not steps and most and not 0 < planned - moved < most:
        steps = max(most - begins, 1)
    elif not steps:
        if warmup_epochs is None:
            warmup_epochs = (begins + moved) / steps_per_epoch if begins else 0.0
        # Over the same epochs as before a change of the batch size, so the rate does not jump.
        steps = max(planned - round(warmup_epochs * steps_per_epoch), 1)
        begins = planned - moved - steps
    plan = RatePlan(section.name, peak, config.warmup_steps, steps, section.final_fraction)
    return plan._replace(decay_begins=begins, warmup_epochs=warmup_epochs)


def scaling_factor(rule: str, global_batch_size: int, base_batch_size: int | None) -> float:
    """The factor on the learning rate for this batch size: linear (Goyal et al. 2017), sqrt or none."""
    if base_batch_size is None or rule == "none":
        return 1.0
    ratio = global_batch_size / base_batch_size
    return ratio if rule == "linear" else math.sqrt(ratio)


def build_schedule(plan: RatePlan) -> Schedule:
    """Factor on the learning rate: linear warm-up to the peak, then the schedule that the plan names.

    It counts optimizer steps only, so it does not depend on the number of processes. The first step of a
    warm-up of n steps has peak / n, as in Goyal et al. 2017; step n has the peak. Outside the step, where its
    values are recorded, a schedule is one program instead of one for each of its operations.
    Raises: ConfigError for a schedule that cannot be created.
    """
    peak = plan.peak
    after: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, plan.decay_steps, plan.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, peak * plan.final_fraction, plan.decay_steps),
    }
    rest = after[plan.name]() if plan.name in after else _scaled(_own(plan), peak)
    if plan.decay_steps and plan.decay_begins != plan.warmup_steps:
        rest = _moved(rest, plan.warmup_steps - plan.decay_begins)
    if plan.warmup_steps:
        warmup = optax.linear_schedule(peak / plan.warmup_steps, peak, max(plan.warmup_steps - 1, 1))
        rest = optax.join_schedules([warmup, rest], [plan.warmup_steps])
    return rest if plan.name == "constant" and not plan.warmup_steps else jax.jit(rest, inline=True)


def _scaled(schedule: Schedule, peak: float) -> Schedule:
    return lambda step: peak * schedule(step)


def _moved(schedule: Schedule, steps: int) -> Schedule:
    return lambda step: schedule(jnp.maximum(step + steps, 0))


def _own(plan: RatePlan) -> Schedule:
    """The given callable, or the one found by its name: one of optax, or `module:attribute`."""
    if plan.own is not None:
        return plan.own
    ours = {name: _with_steps_as_keys(getattr(optax, name)) for name in OPTAX_SCHEDULES}
    found = named("schedule", plan.name, ours, key="schedule.name")
    takes = inspect.signature(found).parameters
    if plan.name not in ours and not plan.options and len(takes) == 1:
        return found  # a schedule itself: steps -> factor
    implied: dict[str, Any] = {
        name: one for name, one in _OF_ONE.items() if name in takes and plan.name in ours
    }
    implied |= {"init_value": 0.0} if "peak_value" in implied and "init_value" in implied else {}
    return called(f"schedule {plan.name!r}", found, plan.options, "schedule.options", **implied)


def _with_steps_as_keys(function: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """`function` of optax, for which the keys of a mapping are steps; a file has them as texts."""

    @wraps(function)
    def made(**options: Any) -> Schedule:
        def steps(value: Any) -> Any:
            return {int(str(step)): one for step, one in value.items()} if isinstance(value, dict) else value

        return function(**{name: steps(value) for name, value in options.items()})

    return made


def with_schedule(optimizer: optax.GradientTransformation, factor: Schedule) -> optax.GradientTransformation:
    """`optimizer` with its updates multiplied by `factor(step)`.

    An update is proportional to the learning rate, so one factor works for every optax transformation.
    """
    return optax.chain(optimizer, optax.scale_by_schedule(factor))


def rate_at(lr: Any, factor: Schedule) -> Callable[[int], float | None]:
    """Optimizer steps done -> learning rate of the last; lr: a number, a schedule, None if not known."""

    def rate(step: int) -> float | None:
        before = max(step - 1, 0)
        peak = lr(before) if callable(lr) else lr
        return None if peak is None else float(peak) * float(factor(before))

    return rate
