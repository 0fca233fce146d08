"""What a key of the configuration affects, and what an exact run cannot have.

The effect is an annotation of the field; every comparison reads it there.

Every key has one. `Numbers` keys affect the numbers of training; `Arrays` keys also decide which arrays
the state is made of; `Content` keys are compared by what they name. `Length` keys affect the numbers
if a schedule ends with the run. `Course` keys change no number, but must be the same on all ranks; `Speed`
and `View` keys may differ between ranks.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel

Effect = Literal["numbers", "arrays", "content", "length", "course", "speed", "view"]
PER_RANK: frozenset[Effect] = frozenset({"content", "speed", "view"})
NO_NUMBERS: frozenset[Effect] = frozenset({"course", "speed", "view"})
ARRAYS: frozenset[Effect] = frozenset({"arrays", "content"})


T = TypeVar("T")
Numbers = Annotated[T, "numbers"]
Arrays = Annotated[T, "arrays"]
Content = Annotated[T, "content"]
Length = Annotated[T, "length"]
Course = Annotated[T, "course"]
Speed = Annotated[T, "speed"]
View = Annotated[T, "view"]


def effects_of(model: type[BaseModel]) -> dict[str, Effect]:
    """What each top-level key of `model` affects. Raises: KeyError for a key without a mark."""
    marks = {
        name: mark
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if mark in get_args(Effect)
    }
    return {name: marks[name] for name in model.model_fields}


def not_exact(config: Any) -> Iterator[tuple[bool, str]]:
    """(whether it prevents an exact run, the reason and what to do instead) for each condition."""
    yield (
        config.global_batch_size is None,
        "needs global_batch_size: with batch_size the global batch would grow with the number of replicas",
    )
    yield (
        (config.global_batch_size or 0) % config.virtual_replicas != 0,
        f"splits the global batch into virtual_replicas = {config.virtual_replicas} equal parts, but "
        f"global_batch_size = {config.global_batch_size} is not divisible by it",
    )
    yield (
        config.gradient_accumulation_steps > 1,
        f"does not allow gradient_accumulation_steps = {config.gradient_accumulation_steps}: "
        "increase virtual_replicas instead, whose parts a device computes one after another",
    )
    yield (
        config.comm != "mean",
        f"supports comm = 'mean' only: {config.comm!r} keeps a state or a sum that depends on the replicas",
    )
    yield (
        config.offload != "none",
        f"runs a step as several programs, but offload = {config.offload!r} needs one: leave it out",
    )
    yield (
        config.sync_batchnorm,
        "computes batch statistics for each part, but sync_batchnorm needs all parts in one program: leave "
        "it out, and use fewer virtual_replicas for larger parts",
    )
