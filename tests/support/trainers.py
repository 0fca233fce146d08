"""A small problem and small models that the trainer's tests share."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.cli import main
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.model.adapter import adapt
from cyxjax.distributed import process_group
from cyxjax.models.sequential import SequentialModel
from cyxjax.train.hooks.hook import Hook, StepInfo
from tests.support.shared_programs import kept

FEATURES, CLASSES = 6, 3
QUIET = {"epochs": 2, "batch_size": 4, "verbose": False, "checkpoint_every_n_epochs": 0}


def classes(num_samples: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples of three Gaussians, far enough apart to be learnt in a few epochs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, num_samples).astype(np.int32)
    inputs = rng.normal(size=(num_samples, FEATURES)).astype(np.float32)
    inputs[np.arange(num_samples), labels] += 3
    return inputs, labels


X, Y = classes()
ce = optax.softmax_cross_entropy_with_integer_labels
VAL = classes(15, seed=1)
NET = "tests.support.brought:Net"
BROUGHT = ["--model.name", NET, "--data.name", "tests.support.brought:data"]  # words of a short experiment


@pytest.fixture(autouse=True)
def own_group(group: None) -> None:
    """If a conftest imports it: each test has its own process group, which ends with the test."""


@pytest.fixture
def as_users_promote() -> Iterator[None]:
    """jax's own rules, not the strict ones of these tests: optax's Adam raises a float to an int32, and
    Flax's average pooling divides floats by integers."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def one_device(group: None) -> Iterator[None]:
    """The test runs in a group of one replica: eight would compile for minutes on a busy machine."""
    yield from _groups_of(1)


@pytest.fixture
def two_devices(group: None) -> Iterator[None]:
    """The test runs in a group of two replicas, and so do the commands that it calls."""
    yield from _groups_of(2)


_init = process_group.init


def _groups_of(count: int) -> Iterator[None]:
    """Until the generator ends, a new group has `count` devices, but for the one of `use_devices`."""

    def init(place: Any = None, *, cpu_devices: Any = None, threads: Any = None) -> Any:
        _init(place, threads=threads)  # jax has started: it has all its devices
        return process_group.narrow(count)

    with mock.patch.object(process_group, "init", init):
        use_devices(count)
        yield


def shake(key: jax.Array, x: jax.Array) -> jax.Array:
    """An augmentation."""
    return x + 0.3 * jax.random.normal(key, x.shape)


def mlp() -> SequentialModel:
    from cyxjax.models.layers import LinearModule, ReLUModule

    return SequentialModel([LinearModule(FEATURES, 8), ReLUModule(), LinearModule(8, CLASSES)])


class Line(linen.Module):
    """One number per sample: a regression."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(x)[..., 0]


def config(**values: Any) -> DistributedTrainingConfig:
    """Two quiet epochs without checkpoints, unless `values` say otherwise."""
    return DistributedTrainingConfig(**{k: v for k, v in (QUIET | values).items() if v is not None})


def trainer(
    model: Any = None, loss: Any = None, lr: float = 0.1, optimizer: Any = None, **options: Any
) -> Any:
    """A trainer of the small classifier in the current group; `optimizer` defaults to SGD."""
    from cyxjax.train.trainer import DistributedTrainer

    loss = cx.CrossEntropyLoss() if loss is None else loss
    return DistributedTrainer(model or mlp(), loss, optimizer or cx.SGDOptimizer(lr), **options)


class At(Hook):
    """Calls `act` once, when the results of a step arrive. counted: the position's attribute to compare."""

    def __init__(self, step: int, act: Callable[[StepInfo], Any], counted: str = "step"):
        self._step, self._act, self._counted = step, act, counted

    def on_step(self, info: StepInfo) -> None:
        if getattr(info.position, self._counted) == self._step:
            self._step = -1
            self._act(info)


def does(**methods: Callable[..., Any]) -> cx.Callback:
    """A callback with these methods, which take `self` first."""
    return type("Does", (cx.Callback,), methods)()


def says(moment: str, answer: Any = True) -> cx.Callback:
    """A callback whose method `moment` ("on_step", for example) returns `answer`."""
    return does(**{moment: lambda self, info: answer})


def after_fit(*arguments: Any, **options: Any) -> Any:
    """A trainer with these options (see `trainer`) after `fit(*arguments)`."""
    one = trainer(**options)
    one.fit(*arguments)
    return one


def loaded(folder: Any, **options: Any) -> Any:
    """A trainer with these options (see `trainer`) that has loaded the newest checkpoint in `folder`."""
    one = trainer(**options)
    one.load_checkpoint(str(folder))
    return one


def lose(info: StepInfo) -> None:
    """An action for `At` that fails the training."""
    raise RuntimeError("lost")


def fitted(*callbacks: Any, data: Any = (X[:24], Y[:24]), one: Any = None, **values: Any) -> Any:
    """A trainer of one layer after a fit of `data`: by default 3 steps of 8 samples per epoch on two devices.

    values: of `config`; with a run_dir, a fit into a run folder. one: a trainer to use instead of a new one.
    """
    one = one or trainer(linen.Dense(3), callbacks=callbacks)
    one.fit(*data, **{name: value for name, value in (QUIET | values).items() if value is not None})
    return one


def run_experiment(folder: Any, **values: Any) -> None:
    """Trains a small network for one step in the run folder `folder`, as the command does, in a new group.

    Without a report, unless `values` ask for it.
    """
    from cyxjax.train import experiment

    small = {"epochs": 1, "batch_size": 16, "model": {"name": NET}, "data": {"name": BROUGHT[-1]}}
    values = small | {"optimizer": {"name": "sgd", "lr": 0.1}, "report": False} | values
    process_group.finalize()
    try:
        assert experiment.run(TrainConfig(run_dir=str(folder), **values)) == 0
    finally:
        process_group.finalize()


def command(*words: object) -> int:
    """Runs `cyxjax WORDS` and ends its process group; the exit code."""
    try:
        return main.main([str(word) for word in words])
    finally:
        process_group.finalize()


def same_bits(one: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def batches(x: Any, y: Any, size: int) -> Any:
    """A loader of these samples in order; it does not number them."""
    return cx.data.Batches([(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)])


def by_hand(
    model: Any, loss: Any, x: Any, y: Any, *, size: int = 8, epochs: int = 1, rule: Any = None
) -> tuple[Any, list[float]]:
    """(parameters, mean loss of each epoch) of a plain hand-written loop over whole batches.

    loss: (output, target) -> a number. rule: an optax rule; None: SGD.
    """
    params, losses = adapt(model).init(jax.random.key(42), jax.tree.map(lambda a: a[:1], x))[0], []
    rule = optax.with_extra_args_support(rule or _SGD)
    state, run = rule.init(params), _value_and_grad(model, loss)
    count = len(jax.tree.leaves(x)[0])
    for _ in range(epochs):
        total = 0.0
        for i in range(0, count, size):
            part = jax.tree.map(lambda a, i=i: a[i : i + size], (x, y))
            value, grads = run(params, *part)
            updates, state = rule.update(grads, state, params, value=value)
            params = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, updates)
            total += float(value) * min(size, count - i)
        losses.append(total / count)
    return params, losses


# By numpy: without jit each operation on a leaf is a program of its own.
_SGD = optax.stateless(lambda grads, params: jax.tree.map(lambda g: np.float32(-0.1) * np.asarray(g), grads))


@kept
def _value_and_grad(model: Any, loss: Any) -> Any:
    """(parameters, inputs, targets) -> (`loss` of what `model` returns, its gradient), compiled."""
    return jax.jit(jax.value_and_grad(lambda p, x, y: loss(model.apply({"params": p}, x), y)))


def trained(
    model: Any, loss: Any, *data: Any, replicas: int = 2, size: int = 8, metrics: Any = None, **options: Any
) -> Any:
    """A trainer after one epoch over `data` in order, with `size` samples per step."""
    use_devices(replicas)
    one = trainer(model, loss, metrics=metrics)
    plan = {"epochs": 1, "batch_size": None, "global_batch_size": size, "shuffle": False}
    one.fit(*data, config(**plan | options))
    return one


def assert_near(found: Any, wanted: Any, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Checks that trees are equal except for the rounding of sums in a different order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, wanted)


def use_devices(count: int) -> None:
    """Creates a group of this process on its first `count` devices; the fixture `group` ends it."""
    process_group.finalize()
    _init()
    process_group.narrow(count)
