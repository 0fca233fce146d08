"""Explains a device's out-of-memory error with this run's numbers and what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from cyxjax.errors import OutOfMemoryError
from cyxjax.train.settings import StepPlan


@contextmanager
def explained(plan: StepPlan, num_replicas: int) -> Iterator[None]:
    """Turns XLA's RESOURCE_EXHAUSTED into an OutOfMemoryError that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).strip().splitlines()[0][:300]
        raise OutOfMemoryError(f"{first}\n{advice(plan, num_replicas)}") from error


def advice(plan: StepPlan, num_replicas: int) -> str:
    """The run's numbers, and four remedies; those in use are marked as such."""
    batch_size, _, k = plan.batch
    total = batch_size * k * num_replicas
    half = max(1, batch_size // 2)
    now = f"batch_size {batch_size}, gradient_accumulation_steps {k}, remat {plan.remat}, {plan.precision}"
    remedies = [
        f"a smaller batch: batch_size: {half}" if batch_size > 1 else "batch_size is 1 already",
        f"the same {total} samples a step in smaller parts: batch_size: {half} with "
        f"gradient_accumulation_steps: {2 * k}"
        if batch_size > 1
        else f"gradient accumulation does not help below batch_size 1 (it is {k})",
        "gradient checkpointing: remat: full"
        if plan.remat == "none"
        else f"gradient checkpointing is on (remat: {plan.remat})",
        "half precision: precision: bfloat16"
        if plan.precision == "float32"
        else f"half precision is on (precision: {plan.precision})",
    ]
    lines = "".join(f"\n  {i}. {text}" for i, text in enumerate(remedies, 1))
    return f"The step is of {now}, on {num_replicas} replicas. HINT: try, one at a time:{lines}"
