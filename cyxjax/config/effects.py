"""What a key of the configuration affects: it stands on its field, and all that compares reads it there.

A key without a mark affects the numbers of training. A key of `Arrays` also decides which arrays the state is
made of; one of `Content` is compared by what it names. `Length` matters to the numbers where a schedule ends
with the run. `Course` keys change no number, but all ranks must have the same; `Speed` and `View` keys are
each rank's own.
"""

from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

Effect = Literal["numbers", "arrays", "content", "length", "course", "speed", "view"]
PER_RANK: frozenset[Effect] = frozenset({"content", "speed", "view"})
NO_NUMBERS: frozenset[Effect] = frozenset({"course", "speed", "view"})
ARRAYS: frozenset[Effect] = frozenset({"arrays", "content"})


class Affects(NamedTuple):
    """Beside the type of a field."""

    effect: Effect


T = TypeVar("T")
Arrays = Annotated[T, Affects("arrays")]
Content = Annotated[T, Affects("content")]
Length = Annotated[T, Affects("length")]
Course = Annotated[T, Affects("course")]
Speed = Annotated[T, Affects("speed")]
View = Annotated[T, Affects("view")]


def effects_of(model: type[BaseModel]) -> dict[str, Effect]:
    """What each top-level key of `model` affects."""
    return {
        name: next((mark.effect for mark in field.metadata if isinstance(mark, Affects)), "numbers")
        for name, field in model.model_fields.items()
    }
