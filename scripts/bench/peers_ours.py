"""Ours, one process of peers.py: the whole public `fit` with history, metrics, progress and last save."""

import contextlib
import sys
import tempfile
import time

from peers_flax import model
from peers_work import WORKS, data, say, steps_of, task

import cyxjax as cx


def main() -> None:
    args = task()
    cx.distributed.init()
    x, y = data(args.work)
    with tempfile.TemporaryDirectory() as folder:
        trainer = cx.distributed.DistributedTrainer(
            model(args.work), cx.CrossEntropyLoss(), cx.AdamOptimizer(1e-3)
        )
        config = cx.distributed.DistributedTrainingConfig(
            epochs=10**6, batch_size=WORKS[args.work].batch, max_steps=steps_of(args), checkpoint_dir=folder,
            resume="never", precision=WORKS[args.work].dtype,
        )  # fmt: skip
        if args.device == "gpu":  # else as by default: a GPT-2 writes 1.5 GB
            config.checkpoint_every_n_epochs = 0
        with contextlib.redirect_stdout(sys.stderr):  # progress is on, the result stands alone
            trainer.fit(x, y, config)  # compiles
            config.max_steps = 2 * steps_of(args)  # steps count on
            start = time.perf_counter()
            trainer.fit(x, y, config)
            seconds = time.perf_counter() - start
        assert trainer.state.step.item() == config.max_steps
    if trainer.is_master():
        say(args, seconds)


if __name__ == "__main__":
    main()
