"""The section that says how the learning rate goes (no jax here)."""

from typing import Annotated

from pydantic import AfterValidator, Field

from cyxjax.config.sections import Count, Options, Strict
from cyxjax.plugins import is_known, known_or

SCHEDULES = ("constant", "cosine", "linear")
OPTAX_SCHEDULES = (  # by optax's names; a value that one starts or peaks at is 1, the factor of optimizer.lr
    *("exponential_decay", "polynomial_schedule", "piecewise_constant_schedule", "cosine_onecycle_schedule"),
    *("linear_onecycle_schedule", "piecewise_interpolate_schedule", "warmup_exponential_decay_schedule"),
    *("warmup_cosine_decay_schedule", "warmup_constant_schedule", "cosine_decay_schedule", "linear_schedule"),
)


def _schedule(name: str) -> str:
    known = dict.fromkeys(SCHEDULES + OPTAX_SCHEDULES)
    if not is_known("schedule", name, known):
        raise ValueError(f"no schedule of this name. {known_or('schedule', name, known)}")
    return name


class ScheduleConfig(Strict):
    """How the learning rate goes after the warm-up (`warmup_steps`), counted in optimizer steps."""

    name: Annotated[str, AfterValidator(_schedule)] = "constant"
    """constant, cosine, linear, of optax (exponential_decay, ...), or module:attribute (step -> factor)."""
    options: Options = {}
    """What a schedule of optax (or yours) takes, for example `transition_steps: 100`."""
    decay_steps: Count | None = Field(default=None, ge=1)
    """Steps from the end of the warm-up to the final rate; none: to the end of the run (cosine, linear)."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak (cosine and linear)."""
