"""Fine-tuning: a frozen body from a safetensors file, LoRA adapters for its kernels, and a new head.

python scripts/examples/finetune.py    (also under the launcher, with the same losses)
"""

import os
from pathlib import Path

import numpy as np
from flax import linen
from safetensors.numpy import save_file

import cyxjax as cx


class Net(linen.Module):
    classes: int

    @linen.compact
    def __call__(self, x):
        for width in (32, 32):
            x = linen.relu(linen.Dense(width)(x))
        return linen.Dense(self.classes, name="head")(x)


def samples(classes, seed):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(1).normal(size=(classes, 8)) * 2
    labels = rng.integers(0, classes, 240).astype(np.int32)
    return (centres[labels] + rng.normal(size=(240, 8))).astype(np.float32), labels


def pretrained(path):
    """Writes a body to `path`, with the names and the layout of a model that was trained with torch."""
    rng = np.random.default_rng(0)
    shapes = {"body.0": (32, 8), "body.1": (32, 32)}
    arrays = {
        f"{name}.weight": rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()
    }
    arrays |= {f"{name}.bias": np.zeros(32, np.float32) for name in shapes}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")  # all ranks write it; none reads half a file
    save_file({name: array.astype(np.float32) for name, array in arrays.items()}, draft)
    os.replace(draft, path)


def main(epochs=3, folder="runs/finetune"):
    body = Path(folder, "body.safetensors")
    pretrained(body)
    trainer = cx.distributed.DistributedTrainer(Net(5), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    config = cx.distributed.DistributedTrainingConfig(
        epochs=epochs,
        global_batch_size=24,
        init_from={
            "path": str(body),
            "map": {"body.*.weight": "Dense_*/kernel", "body.*.bias": "Dense_*/bias"},
            "strict": False,  # the head is new
        },
        lora={"rank": 2, "alpha": 4, "pattern": "Dense_*/kernel"},
        trainable="head/*",
        checkpoint_every_n_epochs=0,
    )
    return trainer.fit(samples(5, seed=0), samples(5, seed=2), config).train_losses


if __name__ == "__main__":
    print("losses:", [round(loss, 4) for loss in main()])
