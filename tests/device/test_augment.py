"""Augmentation depends only on the sample: the same training for any number of replicas and any dispatch."""

from functools import partial

import pytest

from cyxjax.data.streams import Rows
from tests.support.resuming import bits
from tests.support.trainers import X, Y, config, shake, trainer, use_devices


def fitted(devices, *data, **options):
    use_devices(devices)
    one = trainer(augment=shake)
    one.fit(*data or (X, Y), config(batch_size=None, global_batch_size=12, **options))
    return one


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"comm": "fsdp"}, marks=pytest.mark.slow),
        pytest.param({"comm": "zero1", "remat": "full"}, marks=pytest.mark.slow),
    ],
    ids=["mean", "fsdp", "zero1"],
)
def test_losses_are_those_of_one_device(options):
    alone, many = fitted(1).history, fitted(4, **options).history
    # Sums over 12 samples in a different order; a draw of the wrong sample is 1e-2 off.
    assert many.train_losses == pytest.approx(alone.train_losses, rel=1e-6)


@pytest.mark.slow
def test_an_exact_run_has_the_same_bits_and_micro_batches_the_same_losses():
    exact = [fitted(n, reproducibility="exact", virtual_replicas=4, exact_threads=8) for n in (1, 2, 4)]
    assert bits(exact[0]) == bits(exact[1]) == bits(exact[2])
    plain = fitted(2, gradient_accumulation_steps=3).history.train_losses
    assert plain == pytest.approx(exact[0].history.train_losses, rel=1e-6)


@pytest.mark.slow
def test_a_stream_is_augmented_as_the_arrays_are():
    rows = partial(Rows, list(zip(X, Y, strict=True)))
    arrays = fitted(2, shuffle=False).history.train_losses
    assert fitted(2, rows()).history.train_losses == pytest.approx(arrays, rel=1e-6)
    cut = fitted(4, rows(), gradient_accumulation_steps=3).history.train_losses
    assert cut == pytest.approx(arrays, rel=1e-6)
