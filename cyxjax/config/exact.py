"""What an exact run cannot have, each with what to do instead."""

from collections.abc import Iterator
from typing import Any


def not_exact(config: Any) -> Iterator[tuple[bool, str]]:
    """(whether it stands in the way of an exact run, what it is and what to do instead)."""
    yield (
        config.global_batch_size is None,
        "needs global_batch_size: batch_size counts samples per replica, and would grow with their number",
    )
    yield (
        (config.global_batch_size or 0) % config.virtual_replicas != 0,
        f"cuts the global batch into virtual_replicas = {config.virtual_replicas} equal parts, and "
        f"global_batch_size = {config.global_batch_size} does not divide by it",
    )
    yield (
        config.gradient_accumulation_steps > 1,
        f"accumulates anyway: instead of gradient_accumulation_steps = {config.gradient_accumulation_steps} "
        "raise virtual_replicas, whose parts a device computes one after another",
    )
    yield (
        config.comm != "mean",
        f"knows comm = 'mean' alone: {config.comm!r} keeps a state or a sum that depends on the replicas",
    )
    yield (
        config.offload != "none",
        f"makes a step of several programs, and offload = {config.offload!r} is of one: leave it out",
    )
    yield (
        config.sync_batchnorm,
        "takes batch statistics of each part: sync_batchnorm would tie all parts into one program; "
        "use fewer virtual_replicas for larger parts",
    )
