"""Runs that are cut and go on: to the bits of one that was not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from tests.support.trainers import X, Y, config, trainer


def bits(fitted: Any) -> list[bytes]:
    """Of the parameters, leaf by leaf."""
    return [leaf.tobytes() for leaf in jax.tree.leaves(fitted.params)]


def kept(folder: Path) -> dict[str, Any]:
    """Keys of a run that is saved in `folder` after each step, and goes on from there."""
    return {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(folder), "resume": "auto"}


def check_goes_on(
    folder: Path, make: Callable[[], Any], cut: int, new: Callable[[], Any] = trainer, **options: Any
) -> tuple[Any, Any]:
    """(a trainer of a whole run, the data of one that went on after `cut` steps and came to the same).

    make: training data, read from the beginning. new: a trainer.
    """
    whole, first, second, data = new(), new(), new(), make()
    expected = whole.fit(make(), (X, Y), config(**options))
    first.fit(make(), (X, Y), config(max_steps=cut, **options, **kept(folder)))
    history = second.fit(data, (X, Y), config(**options, **kept(folder)))
    assert bits(second) == bits(whole)
    assert (history.train_losses, history.val_losses) == (expected.train_losses, expected.val_losses)
    assert (history.num_steps, history.val_steps) == (expected.num_steps, expected.val_steps)
    return whole, data
