"""A model, a dataset and a metric of your own, and metrics per class with the names of the classes.

python scripts/examples/own_model.py    (also under the launcher, with the same losses)
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import cyxjax as cx

KINDS = ("circle", "cross", "stripes")


class Net(nnx.Module):
    """Any nnx module; the trainer switches dropout and batch norm between training and evaluation."""

    def __init__(self, classes, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, classes, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        return self.head(self.dropout(x.mean((1, 2))))


class Drawings:
    """Any class with a length and items by index; the trainer shuffles and divides them among the ranks."""

    def __init__(self, first, count):
        self._first, self._count = first, count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        rng = np.random.default_rng(self._first + index)
        kind = rng.integers(len(KINDS))
        rows, columns = np.mgrid[-4:4, -4:4] + 0.5
        drawn = {
            "circle": abs(np.hypot(rows, columns) - 3) < 0.6,
            "cross": abs(abs(rows) - abs(columns)) < 0.6,
            "stripes": rows % 2 < 1,
        }[KINDS[kind]]
        return (drawn + rng.normal(0, 0.3, (8, 8)))[..., None].astype(np.float32), np.int32(kind)


def margin(output, target):
    """(B,): by how much the logit of the target exceeds the largest other logit."""
    own = jnp.take_along_axis(output, target[:, None], 1)
    others = jnp.where(jnp.arange(output.shape[1]) == target[:, None], -jnp.inf, output)
    return own[:, 0] - others.max(1)


def main(epochs=3):
    task = cx.Task.classification().with_metrics({"margin": margin, **cx.per_class(KINDS)}, {"margin": "max"})
    trainer = cx.distributed.DistributedTrainer(Net(len(KINDS), nnx.Rngs(0)), task, cx.AdamOptimizer(0.02))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=epochs, global_batch_size=20, monitor="val_margin", checkpoint_every_n_epochs=0
    )
    return trainer.fit(Drawings(0, 150), Drawings(1000, 50), config).train_losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
