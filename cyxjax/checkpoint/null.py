"""Checkpoints that are off, as a value: saves nothing, opens nothing, finds nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.restoring import Restored
from cyxjax.checkpoint.tree import Adapt, Put, PyTree, as_read


class NullCheckpointer:
    """A Checkpointer that is off, with what a fit calls: saves nothing, finds nothing."""

    directory: Path | None = None
    unsaved = ""

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Do nothing."""

    def restore(
        self,
        target: PyTree,
        step: int | None = None,
        *,
        adapt: Adapt | None = None,
        part: bool = False,
        put: Put = as_read,
    ) -> Restored | None:
        """None: there is never a step."""
        del target, step, adapt, part, put
        return None

    def steps(self) -> list[int]:
        return []

    def rewind(self, step: int, why: str = "abandoned") -> list[int]:
        del step, why
        return []

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        return True

    def finish(self, patience_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Do nothing."""

    def forgive(self) -> None:
        """Do nothing."""

    def __enter__(self) -> "NullCheckpointer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing."""


Checkpoints = Checkpointer | NullCheckpointer
