"""One process of peers.py for cyxjax: a whole `fit` with history, metrics, progress and, on CPUs, saves."""

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
        if args.device == "gpu":  # no saves: a checkpoint of GPT-2 has 1.5 GB
            config.checkpoint_every_n_epochs = 0
        with contextlib.redirect_stdout(sys.stderr):  # progress; stdout has only the result
            trainer.fit(x, y, config)  # compiles
            start = time.perf_counter()
            trainer.fit(x, y, config)
            seconds = time.perf_counter() - start
        assert trainer.state.step.item() == 2 * config.max_steps
    if trainer.is_master():
        say(args, seconds)


if __name__ == "__main__":
    main()
