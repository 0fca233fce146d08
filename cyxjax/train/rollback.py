"""`on_nonfinite: rollback`: back to the newest good checkpoint, and on with the samples after the bad step.

The samples between the checkpoint and the bad step are left behind with it: the same samples from the same
state would lead to the same numbers again. A learning rate changed behind the user's back would outlive its
cause.
Source: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5.1: go back, skip the batches, go on.
"""

from collections.abc import Callable

import numpy as np

from cyxjax.errors import CheckpointError
from cyxjax.train.config import DistributedTrainingConfig
from cyxjax.train.hooks import NonFiniteError
from cyxjax.train.loop import Moment, Position

MOST = 3  # rollbacks of one process; more have a cause that goes on
_FLOAT16_STEPS = 50  # left out in a row before no loss scale is to blame: 2^16 is at its least after 30


def patience(config: DistributedTrainingConfig) -> int:
    """Steps in a row that may be left out as not finite before it is an error."""
    return 1 if config.on_nonfinite == "rollback" and not uses_float16(config) else _FLOAT16_STEPS


def fit(
    run: Callable[[Moment], Moment],
    start: Moment,
    go_back: Callable[[], Moment | None],
    say: Callable[[str], None],
    policy: str,
) -> Moment:
    """`run(start)`; with `policy` "rollback" it runs again, up to MOST times, past what was not finite.

    go_back: gives the newest good checkpoint's moment, None if there is none; called on all ranks.
    Raises: NonFiniteError where `run` does and it is no longer of use to go back.
    """
    for left in reversed(range(MOST + 1 if policy == "rollback" else 1)):
        try:
            return run(start)
        except NonFiniteError as error:
            if not left:
                raise
            start = _past(go_back(), error)
            say(_told(start, error))
    raise AssertionError("the last run returns or raises")


def _past(saved: Moment | None, error: NonFiniteError) -> Moment:
    """The state of `saved`, at the place in the data after the bad step."""
    if saved is None:
        raise CheckpointError(
            f"on_nonfinite='rollback', but there is no checkpoint yet to go back to ({error}). "
            "HINT: set checkpoint_every_n_steps, so that there is one early."
        ) from error
    place = Position(saved.position.step, error.position.epoch, error.position.step_in_epoch)
    sums = saved.sums if saved.position.epoch == place.epoch else np.zeros_like(saved.sums)
    return Moment(place, saved.state, sums)


def _told(start: Moment, error: NonFiniteError) -> str:
    return (
        f"WARNING: step {error.position.step} was not finite: back to the checkpoint of step "
        f"{start.position.step}, on with the samples after batch {start.position.step_in_epoch} of epoch "
        f"{start.position.epoch}."
    )


def uses_float16(config: DistributedTrainingConfig) -> bool:
    """Whether steps are left out as a matter of course, to find the loss scale."""
    return "float16" in {part.rpartition("=")[2].strip() for part in config.precision.split(",")}
