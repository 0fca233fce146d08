"""Contrastive learning: each picture is matched with the captions of the whole global batch.

python scripts/examples/contrastive.py    (also under the launcher, with the same losses)
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
    to_picture, to_caption = rng.normal(size=(4, 12)), rng.normal(size=(4, 10))
    return (meaning @ to_picture).astype(np.float32), (meaning @ to_caption).astype(np.float32)


def main(epochs=4):
    trainer = cx.distributed.DistributedTrainer(Towers(), cx.ContrastiveLoss(0.5), cx.SGDOptimizer(0.05))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=epochs, global_batch_size=24, checkpoint_every_n_epochs=0
    )
    picture, caption = pairs()
    return trainer.fit((picture, caption), np.zeros(len(picture), np.int32), config).train_losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
