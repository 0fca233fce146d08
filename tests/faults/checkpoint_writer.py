"""A job that saves, for test_checkpoint_kill: forks one for each line of stdin, `FOLDER` or `FOLDER POINT`.

Forked, because importing jax anew for each of some forty jobs would take longer than all their saves.
Without a POINT it saves until it is killed and prints `FOLDER PID` once, then `FOLDER STEP` for the last
step known to be on disk. With a POINT (`module:function:before` or `:after`) it saves step 1 and dies there.
"""

import importlib
import os
import signal
import sys

import numpy as np

from cyxjax.checkpoint.checkpointer import Checkpointer

NUM_FLOATS = 200_000


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).random(NUM_FLOATS, np.float32), "step": np.int32(step)}


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write: lines of several jobs never mix


def save_without_end(folder: str) -> None:
    say(folder, os.getpid())
    checkpointer = Checkpointer(folder)
    step = max(checkpointer.steps(), default=-1) + 1
    while True:
        checkpointer.save(step, state_of(step), {"step": step})
        say(folder, checkpointer.saved_step)
        step += 1


def save_and_die(folder: str, point: str) -> None:
    module_name, name, when = point.split(":")
    module = importlib.import_module(module_name)
    real = getattr(module, name)

    def dying(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dying)
    say(folder, os.getpid())
    Checkpointer(folder, async_save=False).save(1, state_of(99), {"step": 99})
    say(folder, "survived")
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps killed jobs
    import orbax.checkpoint  # noqa: F401  code is loaded once; no backend is started before a fork

    for line in sys.stdin:
        if os.fork() == 0:
            folder, *point = line.split()
            save_and_die(folder, *point) if point else save_without_end(folder)


if __name__ == "__main__":
    main()
