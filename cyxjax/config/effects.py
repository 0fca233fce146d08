"""What a key of the configuration affects, and what an exact run cannot have.

The effect stands on the field, and all that compares reads it there.

Every key has a mark. `Numbers` keys affect the numbers of training; `Arrays` keys also decide which arrays
the state is made of; `Content` keys are compared by what they name. `Length` keys matter to the numbers where
a schedule ends with the run. `Course` keys change no number, but all ranks must have the same; `Speed` and
`View` keys are each rank's own.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

Effect = Literal["numbers", "arrays", "content", "length", "course", "speed", "view"]
PER_RANK: frozenset[Effect] = frozenset({"content", "speed", "view"})
NO_NUMBERS: frozenset[Effect] = frozenset({"course", "speed", "view"})
ARRAYS: frozenset[Effect] = frozenset({"arrays", "content"})


class Affects(NamedTuple):
    """Beside the type of a field."""

    effect: Effect


T = TypeVar("T")
Numbers = Annotated[T, Affects("numbers")]
Arrays = Annotated[T, Affects("arrays")]
Content = Annotated[T, Affects("content")]
Length = Annotated[T, Affects("length")]
Course = Annotated[T, Affects("course")]
Speed = Annotated[T, Affects("speed")]
View = Annotated[T, Affects("view")]


def effects_of(model: type[BaseModel]) -> dict[str, Effect]:
    """What each top-level key of `model` affects. Raises: KeyError for a key without a mark."""
    marks = {
        name: mark.effect
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Affects)
    }
    return {name: marks[name] for name in model.model_fields}


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
