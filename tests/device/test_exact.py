"""`reproducibility: exact`: the same bits for any number of devices that share the work.

This includes half precision, a loss that weights its samples, and optimizers in turns. A skipped step, a
rollback or an early stop happens at the same step for any number of devices.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.exact import tree_sum
from cyxjax.core.mesh import build_mesh
from cyxjax.core.model import first_values
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import ConfigError
from cyxjax.train.settings import resolve
from cyxjax.train.start.dispatch import placer_for
from scripts.examples import gan
from tests.support import shared_programs
from tests.support.exact import GLOBAL_BATCH, Problem, bits, config, fit, problem, trained
from tests.support.trainers import ce, use_devices

AS_USERS: dict = {}  # programs that the tests which compile as users do share


@contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = jax.config._read(name)  # for all threads: several threads compile programs
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


@pytest.fixture(autouse=True, scope="module")
def numbers_are_promoted() -> Iterator[None]:
    with _set("jax_numpy_dtype_promotion", "standard"):  # optax's Adam raises a float to an integer power
        yield


@pytest.fixture
def as_users_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With LLVM's passes, which contract and reorder: they expose faults other than the order of sums."""
    monkeypatch.setattr(shared_programs, "_BUILT", AS_USERS)
    # But for the first values, which are drawn on one device before there are parts.
    monkeypatch.setattr(first_values, "_OPTIONS", {"xla_backend_optimization_level": 0})
    with _set("jax_disable_most_optimizations", False):
        yield


def alike(one: Problem, *, devices=(1, 2), **options):
    """The trainer on the last of `devices`; checks that its bits are equal on each of them."""
    first, *others = (trained(one, count, **options) for count in devices)
    for other in others:
        assert bits(other) == bits(first)
    return other


# 3 and 5 do not divide 8 parts: devices have two or three, or one or two. Adam, clipping, dropout, a ragged
# last batch and evaluation everywhere; BatchNorm and max pooling in the CNN; class weights and metrics below.
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("cnn of a layer", (2,)),
        # Longer time limits: each device compiles separately, which takes minutes on a busy machine.
        pytest.param("gpt", (2,), marks=(pytest.mark.slow, pytest.mark.timeout(900))),
        *(
            pytest.param(name, (count,), marks=(pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900)))
            for name in ("mlp", "cnn", "gpt")
            for count in (2, 3, 5, 8)
        ),
        pytest.param(
            "resnet18", (2, 3), marks=(pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900))
        ),
    ],
)
def test_any_number_of_devices_gives_the_same_bits(name, devices, as_users_compile):
    alike(problem(name), devices=(1, *devices))


def add_from_left_to_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test each sum of parts is a fold, whose order depends on the devices."""
    folded = lambda node, known, num_parts, add: functools.reduce(add, known.values())  # noqa: E731
    monkeypatch.setattr(tree_sum, "climb", folded)
    monkeypatch.setattr(shared_programs, "_BUILT", {})


def test_a_sum_in_another_order_gives_other_bits(monkeypatch):
    add_from_left_to_right(monkeypatch)  # the control: only the order differs, and the comparison detects it
    one = problem("mlp")
    assert (
        bits(trained(one, 1, evaluates=False))["values"] != bits(trained(one, 2, evaluates=False))["values"]
    )


def test_more_devices_than_parts_are_refused():
    with pytest.raises(ConfigError, match="8 devices .*virtual_replicas=4"):
        placer_for(resolve(config(virtual_replicas=4), 8).step, build_mesh())


def assert_halves_alike(precision, name, devices):
    one = problem(name)
    halves = alike(one, devices=(1, devices), precision=precision)
    assert bits(halves)["values"] != bits(trained(one, 1))["values"]  # the option has an effect


def test_bfloat16_gives_the_same_bits():
    assert_halves_alike("bfloat16", "mlp", 2)  # as the suite compiles: the control's program is shared


WIDE = (pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900))  # compiled for each device separately


@pytest.mark.parametrize(
    ("precision", "name", "devices"),
    [
        pytest.param("float16", "mlp", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", "mlp", 3, marks=pytest.mark.slow),
        *(
            pytest.param(precision, name, devices, marks=WIDE)
            for precision in ("float16", "bfloat16")
            for name, devices in (("cnn", 2), ("cnn", 3), ("gpt", 5))
        ),
    ],
)
def test_halves_give_the_same_bits(precision, name, devices, as_users_compile):
    assert_halves_alike(precision, name, devices)


def test_a_loss_scale_that_comes_down_comes_down_alike():
    # The gradients of a large loss overflow float16 at the first scales, whose steps are skipped.
    large = lambda output, target: 1000 * ce(output, target)  # noqa: E731
    lowered = alike(problem("mlp"), loss=large, precision="float16", epochs=4, evaluates=False)
    assert 0 < lowered.history.skipped_steps < lowered.history.num_steps
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lowered.state.sync))


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")
def test_optimizers_in_turns_leave_the_same_bits(monkeypatch):
    pixels = np.random.default_rng(5).uniform(size=(45, 64)).astype(np.float32)  # steps of 24 and 21

    def after(devices):
        use_devices(devices)
        trainer = cx.distributed.DistributedTrainer(gan.Gan(), gan.task(pixels.mean(0)))
        options = {"global_batch_size": 24, "max_grad_norm": None, "epochs": 2, "reproducibility": "exact"}
        trainer.fit(pixels, pixels, config(**options))
        assert np.isfinite(trainer.history.train_losses).all()
        return bits(trainer)

    exact = after(3)
    assert after(1) == exact
    add_from_left_to_right(monkeypatch)
    assert after(1)["values"] != exact["values"]  # the control


# ---- skipped steps, rollbacks, early stops ---------------------------------------------------------------

POISONED = GLOBAL_BATCH + 7  # a sample; the order determines its step


def poisoned() -> Problem:
    """One sample overflows in the first sums: the gradients of its part are not finite."""
    one = problem("mlp")
    inputs = one.data.inputs.copy()
    inputs[POISONED] = 3e38
    return one._replace(data=ArrayDataset(inputs, one.data.targets))


def test_a_step_that_is_left_out_is_left_out_alike(capsys):
    left_out = alike(poisoned(), on_nonfinite="skip", epochs=2, verbose=True, evaluates=False)
    assert left_out.history.skipped_steps == 2  # once per epoch
    plans = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Batch plan")]
    for devices, plan in enumerate(plans, start=1):  # virtual replicas determine the batch
        assert "4 samples x 8 replicas x 1 accumulation = 32 per step" in plan
        assert plan.endswith(f"; devices {devices}")
    assert len(plans) == 2


def test_a_rollback_goes_back_and_on_alike(tmp_path):
    one, runs = poisoned(), []
    for count in (1, 2):
        saves = {"checkpoint_dir": str(tmp_path / str(count)), "checkpoint_every_n_steps": 1}
        runs.append(trained(one, count, on_nonfinite="rollback", evaluates=False, **saves))
    assert [run.history.rollback_steps for run in runs] == [[1], [1]]
    assert bits(runs[0]) == bits(runs[1])


def test_an_average_of_parameters_and_an_early_stop_are_alike():
    options = {"epochs": 8, "early_stopping_patience": 1}
    averaged = alike(problem("mlp"), hooks=[cx.EMA(0.9)], **options)
    assert averaged.history.stopped_by == "early_stopping"
    assert bits(averaged)["values"] != bits(trained(problem("mlp"), 1, **options))["values"]


def test_several_fits_evaluations_and_their_metrics_are_alike_on_three_devices():
    one, found = problem("mlp"), []
    weighing = cx.CrossEntropyLoss(weight=np.linspace(0.5, 2, 10))
    margin = lambda output, target: output.max(-1) - output.mean(-1)  # noqa: E731
    for count in (1, 3):
        trainer = trained(
            one, count, loss=weighing, metrics=cx.Metrics({"margin": margin}), sentinel_every_n_steps=1
        )
        first = bits(trainer)
        fit(trainer, one)
        assert bits(trainer) != first
        measured = trainer.evaluate_metrics(one.data.inputs, one.data.targets)
        found.append((first, bits(trainer), repr(measured)))
    assert found[0] == found[1]
    assert "margin" in found[0][2]


class Noisy:
    """Items with new noise at each read, from a generator keyed by the sample, or from an unkeyed one."""

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
    one, averaged = problem("mlp"), {"hooks": [cx.EMA(0.9)]}  # whose programs are those of the test above
    noisy = alike(one, data=Noisy(one, keyed=True), **averaged)
    assert bits(noisy) != bits(trained(one, 1, **averaged))  # the noise has an effect


def test_augmentation_keyed_by_nothing_is_refused_by_name():
    one = problem("mlp")
    with pytest.raises(ConfigError, match="sample 0 .*reproducibility='exact'"):
        trained(one, 1, data=Noisy(one, keyed=False))
    noisy = Noisy(one, keyed=False)
    trained(one, 1, data=noisy, reproducibility="none", max_steps=1, evaluates=False)  # allowed otherwise
