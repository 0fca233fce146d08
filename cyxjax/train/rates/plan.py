"""The learning rate's course, resolved from the configuration and the length of the run."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.schedules import SCHEDULES
from cyxjax.errors import ConfigError


class RatePlan(NamedTuple):
    """The factor on the learning rate: warm-up to `peak`, then a decay, counted in optimizer steps."""

    name: str = "constant"
    peak: float = 1.0
    warmup_steps: int = 0
    decay_steps: int = 0  # below 1 as 1; 0 where nothing decays
    final_fraction: float = 0.0
    options: dict[str, Any] = {}  # of a schedule by its name
    own: Callable[[Any], Any] | None = None  # a schedule that was given: steps -> factor


def rate_plan(
    config: DistributedTrainingConfig, section: Any, global_batch_size: int, steps_per_epoch: int
) -> RatePlan:
    """From scaling rule, warm-up and decay; what does not decay says no more than its peak."""
    peak = scaling_factor(config.lr_scaling, global_batch_size, config.base_batch_size)
    _refuse_options_of_ours(section)
    if section is None or getattr(section, "name", "") == "constant":
        return RatePlan("constant", peak, config.warmup_steps)
    if not hasattr(section, "decay_steps"):
        _check_callable(section)
        return RatePlan("own", peak, config.warmup_steps, own=section)
    if section.name not in ("cosine", "linear"):
        return RatePlan(section.name, peak, config.warmup_steps, options=copy.deepcopy(section.options))
    total = config.max_steps or steps_per_epoch * config.epochs
    if not total and not section.decay_steps:
        raise ConfigError(
            f"schedule.name={section.name}: how many steps it decays over is not known of a loader. "
            "HINT: set schedule.decay_steps or max_steps (of a stream steps_per_epoch)."
        )
    decay_steps = section.decay_steps or total - config.warmup_steps
    return RatePlan(section.name, peak, config.warmup_steps, decay_steps, section.final_fraction)


def _check_callable(given: Any) -> None:
    """Raises: ConfigError for a schedule that no step can be asked of."""
    if not callable(given):
        is_rate = isinstance(given, int | float)
        way = f"the rate is the optimizer's, lr={given}" if is_rate else "schedule=lambda step: 1.0"
        raise ConfigError(
            f"schedule={given!r}: expected a function, steps -> factor on the learning rate. HINT: {way}."
        )


def _refuse_options_of_ours(section: Any) -> None:
    """Raises: ConfigError for options of a schedule of ours, which has keys: they would change nothing."""
    options = getattr(section, "options", None)
    if not options or getattr(section, "name", "") not in SCHEDULES:
        return
    key = f"schedule.options.{next(iter(options))}"
    keys = "optimizer.lr" if section.name == "constant" else "schedule.decay_steps or schedule.final_fraction"
    raise ConfigError(
        f"{key}: schedule {section.name!r} has no options, those of optax and your own have. "
        f"HINT: set {keys} in its place.",
        key=key,
    )


def scaling_factor(rule: str, global_batch_size: int, base_batch_size: int | None) -> float:
    """How much larger the learning rate is for this batch: linear (Goyal et al. 2017), sqrt or none.

    Raises: ConfigError for a base batch size that nothing is scaled by.
    """
    if base_batch_size is None:
        return 1.0
    if rule == "none":
        raise ConfigError(
            f"base_batch_size={base_batch_size} changes nothing with lr_scaling='none'. HINT: "
            "lr_scaling='linear' (or 'sqrt') scales the learning rate by it; or leave it out.",
            key="base_batch_size",
        )
    ratio = global_batch_size / base_batch_size
    return ratio if rule == "linear" else math.sqrt(ratio)
