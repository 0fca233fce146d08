"""Contrastive learning: each picture finds its caption among those of the whole global batch.

python scripts/examples/contrastive.py    (under the launcher too: the losses are the same)
"""

import numpy as np
from flax import linen

import cyxjax as cx


class Towers(linen.Module):
    """Two inputs, two embeddings."""

    @linen.compact
    def __call__(self, picture, caption):
        return linen.Dense(16, name="picture")(picture), linen.Dense(16, name="caption")(caption)


def pairs(count=96):
    rng = np.random.default_rng(0)
    meaning = rng.normal(size=(count, 4))
    see, say = rng.normal(size=(4, 12)), rng.normal(size=(4, 10))
    return (meaning @ see).astype(np.float32), (meaning @ say).astype(np.float32)


def main(epochs=4):
    trainer = cx.distributed.DistributedTrainer(Towers(), cx.ContrastiveLoss(0.5), cx.SGDOptimizer(0.05))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=epochs, global_batch_size=24, checkpoint_every_n_epochs=0
    )
    picture, caption = pairs()
    return trainer.fit((picture, caption), np.zeros(len(picture), np.int32), config).train_losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
