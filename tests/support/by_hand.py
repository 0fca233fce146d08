"""A training, compared with the loop that a user would write by hand on one device."""

from typing import Any

from tests.support.trainers import assert_near, by_hand, trained


def assert_as_by_hand(
    model: Any,
    loss: Any,
    x: Any,
    y: Any,
    *,
    written: Any = None,
    size: int = 8,
    epochs: int = 1,
    data: Any = None,
    near: tuple[float, float] = (2e-5, 2e-6),
    **options: Any,
) -> tuple[Any, list[float]]:
    """(trainer, mean loss of each epoch by hand) after a training whose parameters are those of the loop.

    written: `loss` as one number, if it is none. data: what the trainer gets instead of (x, y).
    near: relative and absolute tolerance. options: of `trained`.
    """
    one = trained(model, loss, *(data or (x, y)), size=size, epochs=epochs, **options)
    params, losses = by_hand(model, written or loss, x, y, size=size, epochs=epochs)
    assert_near(one.params, params, *near)
    return one, losses
