"""`cyxjax init DIR`: a new project that is ready to train: model, data, configuration, test."""

from collections.abc import Sequence
from pathlib import Path

from cyxjax.command import Parser
from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.files import write_whole

_MODEL = '''"""The model: any flax.linen module. Its fields are the options of config.yaml."""

import jax
from flax import linen


class Net(linen.Module):
    width: int = 32
    num_classes: int = 2  # set this to the number of classes in your data

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.relu(linen.Dense(self.width)(x))
        x = linen.relu(linen.Dense(self.width)(x))
        return linen.Dense(self.num_classes)(x)
'''
_DATA = '''"""The data: a function that returns (train, validation, test), each inputs and targets."""

import numpy as np


def load(samples: int = 1200, seed: int = 0) -> tuple:
    """Two spirals. Replace them with your own arrays, or a dataset with __len__ and __getitem__."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, samples).astype(np.int32)
    turn = rng.uniform(0.25, 1.0, samples)
    angle = 3 * np.pi * turn + np.pi * labels
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) + rng.normal(0, 0.02, (samples, 2))
    points = points.astype(np.float32) * 3
    cuts = [samples * 8 // 10, samples * 9 // 10]
    return tuple(zip(np.split(points, cuts), np.split(labels, cuts), strict=True))
'''
_CONFIG = """# python -m cyxjax.train --config config.yaml            (--help: every key)

epochs: 20
batch_size: 32
model: {name: "my_model:Net", options: {width: 32}}
data: {name: "my_data:load"}
optimizer: {name: adam, lr: 0.01}
schedule: {name: cosine}
checkpoint_every_n_epochs: 10
"""
_TEST = '''"""python -m pytest: several devices train like one device, and the model learns."""

from my_data import load
from my_model import Net

import cyxjax as cx


def test_four_devices_train_as_one():
    train, _, _ = load(64)
    cx.testing.check_replicas(Net(), cx.CrossEntropyLoss(), train, replicas=4)


def test_it_learns():
    train, val, test = load()
    with cx.testing.devices(2):
        trainer = cx.distributed.DistributedTrainer(Net(), cx.CrossEntropyLoss(), cx.AdamOptimizer(0.01))
        quiet = {"verbose": False, "checkpoint_every_n_epochs": 0}
        trainer.fit(train, val, cx.distributed.DistributedTrainingConfig(epochs=15, **quiet))
        assert trainer.evaluate(test)[1] > 0.8
'''
FILES = {"my_model.py": _MODEL, "my_data.py": _DATA, "config.yaml": _CONFIG, "test_training.py": _TEST}


def main(argv: Sequence[str]) -> int:
    """Writes the files; returns the exit code. Raises: ConfigError if one of them already exists."""
    parser = Parser(prog="cyxjax init", description=__doc__, epilog="example: cyxjax init my_project")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or one without these files")
    folder = parser.parse_args(argv).folder
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise ConfigError(f"{folder} already contains {', '.join(there)}. HINT: name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        write_whole(folder / name, text)
    print(f"{', '.join(FILES)} -> {folder}")
    print(f"Next: cd {folder}; python -m cyxjax.train --config config.yaml; python -m pytest")
    return EXIT_OK
