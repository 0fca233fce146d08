"""Jobs that save, for test_checkpoint_kill: each is forked and reports its progress through a pipe."""

import importlib
import os
import signal
from multiprocessing.connection import Connection

import numpy as np

from cyxjax.checkpoint.checkpointer import Checkpointer

NUM_FLOATS = 200_000


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).random(NUM_FLOATS, np.float32), "step": np.int32(step)}


def save_without_end(folder: str, reports: Connection) -> None:
    """Reports, each time a save begins, the last step that is known to be on disk."""
    checkpointer = Checkpointer(folder)
    step = max(checkpointer.steps(), default=-1) + 1
    while True:
        checkpointer.save(step, state_of(step), {"step": step})
        reports.send(step - 1)
        step += 1


def save_and_die(folder: str, point: str) -> None:
    """Saves step 1 and dies at `point`: `module:function:before` or `:after`."""
    module_name, name, when = point.split(":")
    module = importlib.import_module(module_name)
    real = getattr(module, name)

    def dying(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)
    Checkpointer(folder, async_save=False).save(1, state_of(99), {"step": 99})
