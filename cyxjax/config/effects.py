"""What a key of the configuration affects: it stands on its field, and all that compares reads it there.

Every key has a mark. `Numbers` keys affect the numbers of training; `Arrays` keys also decide which arrays
the state is made of; `Content` keys are compared by what they name. `Length` keys matter to the numbers where
a schedule ends with the run. `Course` keys change no number, but all ranks must have the same; `Speed` and
`View` keys are each rank's own.
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
