"""Trains with a loss over the global batch and with class weights, and writes the results."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import linen

import cyxjax as cx


def main(folder: str) -> None:
    rng, found = np.random.default_rng(0), {}
    inputs = rng.normal(size=(19, 8)).astype(np.float32)
    labels = (np.arange(19) % 3).astype(np.int32)
    weighed = cx.CrossEntropyLoss(weight=[1, 2, 20])
    compared = cx.GlobalLoss(lambda o, t, w: ((o - (o.T @ w / w.sum())) ** 2).sum(-1) - 0.1 * o[:, 0])
    for name, loss in {"weighed": weighed, "compared": compared}.items():
        trainer = cx.distributed.DistributedTrainer(linen.Dense(3), loss, optax.sgd(0.01))
        config = cx.distributed.DistributedTrainingConfig(
            epochs=2, global_batch_size=8, verbose=False, checkpoint_every_n_epochs=0
        )
        history = trainer.fit(inputs, labels, config)
        sums = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(trainer.params)]
        found[name] = [*history.train_losses, trainer.evaluate(inputs, labels)[0], *sums]
    if trainer.is_master():
        Path(folder, "found.json").write_text(json.dumps({"world_size": history.world_size, **found}))


if __name__ == "__main__":
    main(sys.argv[1])
