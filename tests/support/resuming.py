"""Interrupted and resumed runs, compared with the bits of an uninterrupted one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import linen

from tests.support.trainers import X, Y, config, trainer


def bits(fitted: Any) -> list[bytes]:
    """The bytes of the parameters, leaf by leaf."""
    return [leaf.tobytes() for leaf in jax.tree.leaves(fitted.params)]


def kept(folder: Path) -> dict[str, Any]:
    """Settings of a run that saves in `folder` at its end and resumes from it."""
    return {"checkpoint_every_n_steps": 1000, "checkpoint_dir": str(folder), "resume": "auto"}


def check_goes_on(
    folder: Path,
    make: Callable[[], Any],
    cut: int,
    new: Callable[[], Any] = lambda: trainer(linen.Dense(3)),
    **options: Any,
) -> tuple[Any, Any]:
    """(trainer of an uninterrupted run, data of a run resumed after `cut` steps); checks that both are equal.

    make: creates training data at its beginning. new: creates a trainer.
    """
    whole, first, second, data = new(), new(), new(), make()
    expected = whole.fit(make(), (X, Y), config(**options))
    first.fit(make(), (X, Y), config(max_steps=cut, **options, **kept(folder)))
    history = second.fit(data, (X, Y), config(**options, **kept(folder)))
    assert bits(second) == bits(whole)
    assert (history.train_losses, history.val_losses) == (expected.train_losses, expected.val_losses)
    assert (history.num_steps, history.val_steps) == (expected.num_steps, expected.val_steps)
    return whole, data
