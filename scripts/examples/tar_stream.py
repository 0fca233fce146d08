"""Samples from tar shards, decoded by threads, mixed 3:1 with arrays, and augmented on the device.

python scripts/examples/tar_stream.py    (also under the launcher, with the same losses)
"""

import io
import tarfile
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import linen

import cyxjax as cx


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.Conv(8, (3, 3))(x)).mean((1, 2))
        return linen.Dense(3)(x)


def flipped(key, x):
    """One picture (H, W, C), flipped horizontally or unchanged; its key does not depend on the device."""
    return jax.lax.cond(jax.random.bernoulli(key), lambda x: x[:, ::-1], lambda x: x, x)


def picture(label, rng):
    found = rng.normal(0, 0.5, (6, 6, 3)).astype(np.float32)
    found[..., label] += 1
    return found


def write_shards(folder, rng):
    """Writes shards as webdataset does: 000.npy and 000.cls are one sample."""
    for number in range(2):
        with tarfile.open(Path(folder, f"train-{number}.tar"), "w") as archive:
            for i in range(40):
                array, label = io.BytesIO(), int(rng.integers(0, 3))
                np.save(array, picture(label, rng))
                for name, data in ((f"{i:03}.npy", array.getvalue()), (f"{i:03}.cls", str(label).encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


def main(epochs=3):
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(folder, rng)
        labels = rng.integers(0, 3, 30).astype(np.int32)
        others = np.stack([picture(label, rng) for label in labels]), labels
        shards = cx.data.as_dataset(cx.data.TarShards(f"{folder}/train-*.tar", "npy", "cls"), num_workers=2)
        data = cx.data.Mixture([shards, others], [3, 1])
        optimizer = cx.SGDOptimizer(0.2)
        trainer = cx.distributed.DistributedTrainer(Net(), cx.CrossEntropyLoss(), optimizer, augment=flipped)
        config = cx.distributed.DistributedTrainingConfig(
            epochs=epochs, global_batch_size=16, checkpoint_every_n_epochs=0
        )
        losses = trainer.fit(data, config=config).train_losses
        shards.close()  # ends its threads
        return losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
