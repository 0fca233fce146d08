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
DECAY = "decay"  # in the metadata of a checkpoint
_OF_ONE = {"init_value": 1.0, "peak_value": 1.0, "value": 1.0}  # a factor starts, or peaks, at 1


class Decay(NamedTuple):
    """A decay of which the part (s - begins) / steps is done after s steps of the optimizer."""

    begins: float  # at the end of the warm-up; another step, even below 0, after a change of the batch size
    steps: float  # at least 1
    # What it was made for: global batch size, steps of an epoch, epochs, max_steps, warm-up; or nothing.
    made_for: tuple[int, ...] = ()


class RatePlan(NamedTuple):
    """The factor on the learning rate: warm-up to `peak`, then a decay, counted in optimizer steps."""

    name: str = "constant"
    peak: float = 1.0
    warmup_steps: int = 0
    decay: Decay | None = None
    final_fraction: float = 0.0
    options: dict[str, Any] = {}  # of a schedule given by its name
    own: Callable[[Any], Any] | None = None  # a schedule that was given: steps -> factor


class Resumed(NamedTuple):
    """Where a resumed run goes on: steps of its optimizer, whole epochs, samples of the current epoch, and
    the decay of its rate, if any.
    """

    steps: int
    epochs: int
    samples: int
    decay: Decay | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Resumed | None":
        """Where a run goes on from a checkpoint with this metadata; None if it holds no position."""
        at = meta.get("position")
        if not at:
            return None
        history = meta.get("history")
        skipped = history.get("skipped_steps", 0) if isinstance(history, dict) else 0
        steps = int(at["step"]) - int(meta.get("first_step", 0)) - int(skipped)
        return cls(steps, int(at["epoch"]), int(at["samples"]), decay_of(meta.get(DECAY)))

    def steps_left(self, epoch: BatchPlan, epochs: int) -> int:
        """Steps to the end of `epochs`, if the rest has the batches of `epoch`."""
        in_this = epoch.rest(self.samples).num_steps
        return max((epochs - self.epochs - 1) * epoch.num_steps + in_this, 0)

    def trained(self, epoch: BatchPlan) -> float:
        """Epochs so far, with the part of the current one."""
        return self.epochs + min(self.samples / epoch.num_samples, 1.0)


def decay_of(stored: Any) -> Decay | None:
    """The decay that JSON holds as a list."""
    return Decay(stored[0], stored[1], tuple(stored[2])) if stored else None


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
    epoch: BatchPlan | None,
    resumed: Resumed | None = None,
) -> RatePlan:
    """The plan of the rate from scaling rule, warm-up and decay.

    section: a ScheduleConfig, or a function (steps -> factor). epoch: None for a loader. resumed: where the
    run goes on, if it is resumed.
    Raises: ConfigError for a decay over an unknown number of steps, and for `options` of one of our own
        schedules, which are set by keys.
    """
    peak = scaling_factor(config.lr_scaling, global_batch_size, config.base_batch_size)
    if not isinstance(section, ScheduleConfig):
        return RatePlan("own", peak, config.warmup_steps, own=section)
    if section.name not in SCHEDULES:
        return RatePlan(section.name, peak, config.warmup_steps, options=copy.deepcopy(section.options))
    checked_options(f"schedule {section.name!r}", lambda: None, section.options, "schedule.options")
    if section.name == "constant":
        return RatePlan("constant", peak, config.warmup_steps)
    if section.decay_steps:
        decay = Decay(config.warmup_steps, section.decay_steps)
    else:
        decay = _to_the_end(config, section.name, global_batch_size, epoch, resumed)
    return RatePlan(section.name, peak, config.warmup_steps, decay, section.final_fraction)


def _to_the_end(
    config: DistributedTrainingConfig,
    name: str,
    global_batch_size: int,
    epoch: BatchPlan | None,
    resumed: Resumed | None,
) -> Decay:
    """A decay from the end of the warm-up to the end of the run.

    That of a resumed run is as it was, or, if anything has changed, goes on from the part that is done.
    """
    warmup, most, epochs = config.warmup_steps, config.max_steps or 0, config.epochs
    steps_per_epoch = epoch.num_steps if epoch else config.steps_per_epoch or 0
    made_for = (global_batch_size if epoch else 0, steps_per_epoch, epochs, most, warmup)
    if resumed and resumed.decay and resumed.decay.made_for == made_for:
        return resumed.decay
    ends = min(filter(None, (most, steps_per_epoch * epochs)), default=0)
    if not ends:
        raise ConfigError(
            f"schedule.name={name}: the number of steps to decay over is not known for a loader. "
            "HINT: set schedule.decay_steps or max_steps (for a stream, steps_per_epoch)."
        )
    begins: float = warmup
    until: float = ends
    if epoch and resumed:
        left = min(resumed.steps_left(epoch, epochs), _left(most, resumed.steps))
        until = resumed.steps + max(left, 0)
        if left > 0 and resumed.steps > warmup:
            begins = _begins(resumed, epoch, made_for, left)
    return Decay(begins, max(until - begins, 1), made_for)


def _left(most: int, steps: int) -> float:
    """Steps left by `max_steps`; 0: no limit."""
    return most - steps if most else math.inf


def _begins(resumed: Resumed, epoch: BatchPlan, made_for: tuple[int, ...], left: float) -> float:
    """The step at which the decay of a resumed run begins, so that it goes on from the part that is done.

    With other epochs or another `max_steps`, that is the part of a run that had these from its beginning.
    left: steps to the end of the run now.
    """
    now, before, trained = resumed.steps, resumed.decay, resumed.trained(epoch)
    _, steps_per_epoch, epochs, most, warmup = made_for
    was = before.made_for if before and before.made_for else None  # else of an earlier version, or constant
    if was:
        is_same_batch = was[:2] == made_for[:2]
    else:
        is_same_batch = now + resumed.steps_left(epoch, epochs) == steps_per_epoch * epochs

    def steps_to(epochs: int) -> float:
        """Steps left to the end of `epochs` with the batches so far."""
        if is_same_batch:
            return resumed.steps_left(epoch, epochs)
        return (epochs - trained) * (was[1] if was else now / max(trained, 1e-9))

    begins: float = warmup
    longer = 0.0
    if before and was:
        _, _, old_epochs, old_most, old_warmup = was
        begins = before.begins + warmup - old_warmup
        # After a rollback or steps left out, it ends later than the run.
        longer = before.begins + before.steps - now - min(steps_to(old_epochs), _left(old_most, now))
    would_be_left = min(steps_to(epochs), _left(most, now)) + longer
    if would_be_left <= 0 or abs(would_be_left - left) < 0.001:
        return begins
    return now - left * (now - begins) / would_be_left


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
    decay = plan.decay or Decay(plan.warmup_steps, 1)
    steps: Any = decay.steps  # optax takes any number
    after: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, steps, plan.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, peak * plan.final_fraction, steps),
    }
    rest = after[plan.name]() if plan.name in after else _scaled(_own(plan), peak)
    if decay.begins != plan.warmup_steps:
        rest = _moved(rest, plan.warmup_steps - decay.begins)
    if plan.warmup_steps:
        warmup = optax.linear_schedule(peak / plan.warmup_steps, peak, max(plan.warmup_steps - 1, 1))
        rest = optax.join_schedules([warmup, rest], [plan.warmup_steps])
    return rest if plan.name == "constant" and not plan.warmup_steps else jax.jit(rest, inline=True)


def _scaled(schedule: Schedule, peak: float) -> Schedule:
    return lambda step: peak * schedule(step)


def _moved(schedule: Schedule, steps: float) -> Schedule:
    return lambda step: schedule(jnp.maximum(jnp.float32(step) + steps, 0))


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


def rate_at(lr: Any, factor: Schedule, more: Callable[[], float]) -> Callable[[int], float | None]:
    """Optimizer steps done -> learning rate of the last; lr: a number, a schedule, None if not known.

    more: a further factor, as it is now.
    """

    def rate(step: int) -> float | None:
        before = max(step - 1, 0)
        peak = lr(before) if callable(lr) else lr
        return None if peak is None else float(peak) * float(factor(before)) * more()

    return rate
