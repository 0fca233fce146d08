"""Where a trainer's training stands: between its fits, in the middle of one, and after one that failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import jax

from cyxjax.errors import GroupError
from cyxjax.train.loop import RunState

UNTRAINED = "this trainer has no parameters yet. HINT: call fit(...) or load_checkpoint(...) first."
_GONE = (
    "this trainer's state went with a step that failed: the device had taken it. HINT: load_checkpoint(...) "
    "into a new trainer, or rerun with checkpoints: it goes on from the newest."
)


class Present:
    """The present moment, whoever moves it. A step consumes the state before it, so only one is ever kept."""

    def __init__(self) -> None:
        self._now: Callable[[], RunState] | None = None
        self._fitting = False

    @property
    def known(self) -> bool:
        return self._now is not None

    def at(self, moment: RunState) -> None:
        """Stands still at `moment`."""
        self.follow(lambda: moment)

    def follow(self, now: Callable[[], RunState]) -> None:
        """Moves on by itself: `now` says where."""
        self._now = now

    def get(self) -> RunState:
        """Raises: GroupError before there is one, or where its arrays are gone."""
        if self._now is None:
            raise GroupError(UNTRAINED)
        moment = self._now()
        leaves = jax.tree.leaves(moment.state)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise GroupError(_GONE)
        return moment

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """While a fit moves it: what would move it too is refused."""
        self.refuse_in_fit("fit")
        self._fitting = True
        try:
            yield
        finally:
            self._fitting = False

    def refuse_in_fit(self, call: str) -> None:
        """Raises: GroupError while a fit is under way, whose loop would not take what `call` makes."""
        if self._fitting:
            raise GroupError(
                f"{call}(...) was called while a fit of this trainer is under way (in a callback, or another "
                "thread). HINT: call it after that fit, or use a trainer of its own; evaluate, predict and "
                "save_checkpoint may be called."
            )


@contextmanager
def handed_out_after_errors(hand_out: Callable[[], None]) -> Iterator[None]:
    """Calls `hand_out` where the fit inside ends in an error: a model that holds values has what was learned.

    In one process alone: of several, an error of one ends them all.
    """
    try:
        yield
    except BaseException:
        if jax.process_count() == 1:
            with suppress(GroupError):  # the state went with the step
                hand_out()
        raise
