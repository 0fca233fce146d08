"""Objects of a user, which a configuration names as `tests.support.brought:NAME`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import cyxjax as cx
from cyxjax.core.strategy import Sync
from cyxjax.data import DatasetInfo, Rows, Splits, as_dataset
from cyxjax.sync.mean import mean
from cyxjax.train.hooks.hook import EpochInfo, Hook


class Net(linen.Module):
    width: int = 4
    num_classes: int = 2

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(self.num_classes)(linen.relu(linen.Dense(self.width)(x)))


made = Net(width=3)


class NnxNet(nnx.Module):
    def __init__(self, width: int, num_classes: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.last = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def data(rows: int = 32) -> tuple:
    """(train, val, test), two classes."""
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    return (x, y), (x[:8], y[:8]), (x[8:16], y[8:16])


def brier(output: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.softmax(output) - jax.nn.one_hot(target, output.shape[-1])).sum(-1)


def sure(output: jax.Array, target: jax.Array, above: float = 0.5) -> jax.Array:
    return (jax.nn.softmax(output).max(-1) > above).astype(jnp.float32)


sure.better = "max"  # type: ignore[attr-defined]

counted = cx.Statistic(  # samples, without padding
    lambda: jnp.zeros(()),
    lambda state, o, t, weight: state + weight.sum(),
    lambda a, b: a + b,
    lambda state: state,
)


class Count(Hook):
    epochs = 0

    def __init__(self, by: int = 1):
        self.by = by

    def on_epoch(self, info: EpochInfo) -> None:
        Count.epochs += self.by


class Lines:
    def __init__(self, folder: Path):
        self.path = folder / "lines.txt"

    def log(self, record: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{sorted(record)}\n")

    def close(self) -> None: ...


def my_mean(optimizer: Any) -> Sync:
    return mean(optimizer)


number = 3


class Stream:
    """Items in order; its iterators report their position, as grain's do. read: how many items were made."""

    def __init__(self, items: Sequence):
        self.items, self.read = items, 0

    def __iter__(self) -> Any:
        return Place(self)


class Place:
    """An iterator of a Stream."""

    def __init__(self, of: Stream):
        self.of, self.number = of, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.number == len(self.of.items):
            raise StopIteration
        self.number += 1
        self.of.read += 1
        return self.of.items[self.number - 1]

    def get_state(self) -> dict:
        return {"number": self.number, 7: (b"bytes", np.int64(3))}

    def set_state(self, state: dict) -> None:
        assert state[7] == (b"bytes", 3)
        self.number = state["number"]


def stream() -> Splits:
    """A stream for `data.name`: it states what a model must know of it, since it has no length."""
    labels, sizes = np.arange(1, 91, dtype=np.int32) % 3, np.arange(1, 91, dtype=np.float32) % 7
    inputs = np.eye(3, 6, dtype=np.float32)[labels] * sizes[:, None]
    held, info = as_dataset((inputs[:12], labels[:12])), DatasetInfo("stream", "classification", 3, (6,))
    items = list(zip(inputs, labels, strict=True))
    return Splits(Rows(Stream(items)), held, held, info)  # type: ignore[arg-type]
