"""`reproducibility: exact` through the trainer: what changes a run's course does so alike on any devices."""

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import ConfigError
from cyxjax.train.trainer import DistributedTrainer
from tests.device.test_exact import numbers_are_promoted  # noqa: F401 (a fixture for every test here)
from tests.support.exact import GLOBAL_BATCH, Problem, bits, config, problem
from tests.support.trainers import use_devices

POISONED = GLOBAL_BATCH + 5  # a sample; which step meets it the order says
VAL = 21


def poisoned() -> Problem:
    """One sample whose first sums overflow: the gradients of its part are not finite."""
    one = problem("mlp")
    inputs = one.data.inputs.copy()
    inputs[POISONED] = 3e38
    return one._replace(data=ArrayDataset(inputs, one.data.targets))


def trained(
    one: Problem, devices: int, *, hooks=(), data=None, metrics=None, **options
) -> DistributedTrainer:
    """A trainer after one fit on so many devices of this process."""
    use_devices(devices)
    optimizer = cx.AdamOptimizer(0.01)
    trainer = DistributedTrainer(
        one.model, cx.CrossEntropyLoss(), optimizer, callbacks=hooks, metrics=metrics
    )
    fit(trainer, one, data, **options)
    return trainer


def fit(trainer: DistributedTrainer, one: Problem, data=None, **options) -> None:
    quiet = {"verbose": False, "checkpoint_every_n_epochs": 0}
    # Other answers than in training: what is learned makes the loss worse, and stops early.
    val = ArrayDataset(one.data.inputs[:VAL], (one.data.targets[:VAL] + 1) % 10)
    trainer.fit(data or one.data, val, config=config(**quiet | options))


def alike(one: Problem, *, devices=(1, 2), **options) -> DistributedTrainer:
    """The trainer on the last of `devices`, whose bits are those of the first."""
    first, last = (trained(one, count, **options) for count in devices)
    assert bits(first) == bits(last)
    return last


def test_a_step_that_is_left_out_is_left_out_alike(capsys):
    left_out = alike(poisoned(), on_nonfinite="skip", epochs=2, verbose=True)
    assert left_out.history.skipped_steps == 2  # once an epoch
    plans = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Batch plan")]
    for devices, plan in enumerate(plans, start=1):  # virtual replicas make the batch
        assert "4 samples x 8 replicas x 1 accumulation = 32 per step" in plan
        assert plan.endswith(f"; devices {devices}")
    assert len(plans) == 2


def test_a_rollback_goes_back_and_on_alike(tmp_path):
    one, runs = poisoned(), []
    for count in (1, 2):
        saves = {"checkpoint_dir": str(tmp_path / str(count)), "checkpoint_every_n_steps": 1}
        runs.append(trained(one, count, on_nonfinite="rollback", **saves))
    assert [run.history.rollback_steps for run in runs] == [[1], [1]]
    assert bits(runs[0]) == bits(runs[1])


def test_an_average_of_parameters_and_an_early_stop_are_alike():
    options = {"epochs": 8, "early_stopping_patience": 1}
    averaged = alike(problem("mlp"), hooks=[cx.EMA(0.9)], **options)
    assert averaged.history.stopped_by == "early_stopping"
    assert bits(averaged)["values"] != bits(trained(problem("mlp"), 1, **options))["values"]


def test_several_fits_evaluations_and_their_metrics_are_alike():
    one, found = problem("mlp"), []
    margin = lambda output, target: output.max(-1) - output.mean(-1)  # noqa: E731
    for count in (1, 2):
        trainer = trained(one, count, metrics=cx.Metrics({"margin": margin}))
        first = bits(trainer)
        fit(trainer, one)
        assert bits(trainer) != first
        measured = trainer.evaluate_metrics(one.data.inputs, one.data.targets, batch_size=5)
        found.append((first, bits(trainer), repr(measured)))
    assert found[0] == found[1]
    assert "margin" in found[0][2]


class Noisy:
    """Items with noise drawn anew at each reading: by a generator named by the sample, or by none."""

    def __init__(self, one: Problem, keyed: bool):
        self._data, self._keyed = one.data, keyed
        self._shared = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int):
        draws = np.random.default_rng(index) if self._keyed else self._shared
        row = self._data.inputs[index]
        return row + draws.normal(size=row.shape).astype(np.float32), self._data.targets[index]


def test_augmentation_keyed_by_the_sample_is_alike():
    one = problem("mlp")
    noisy = alike(one, data=Noisy(one, keyed=True))
    assert bits(noisy) != bits(trained(one, 1))  # the noise did something


def test_augmentation_keyed_by_nothing_is_refused_by_name():
    one = problem("mlp")
    with pytest.raises(ConfigError, match="sample 0 .*reproducibility='exact'"):
        trained(one, 1, data=Noisy(one, keyed=False))
    trained(one, 1, data=Noisy(one, keyed=False), reproducibility="none", max_steps=1)  # free otherwise
