"""`reproducibility: exact` with halves: the bits of one device, the loss scale among them."""

import jax
import numpy as np
import pytest

from cyxjax.data.sources import ArrayDataset
from tests.device.test_exact import as_users_compile, numbers_are_promoted  # noqa: F401 (fixtures)
from tests.support.exact import problem, train

slow = (pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900))  # compiled for each device in turn


def test_halves_give_the_same_bits():
    halves_give_the_same_bits("bfloat16", "mlp", 3)


@pytest.mark.parametrize(
    ("precision", "name", "devices"),
    [
        pytest.param("float16", "mlp", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", "mlp", 3, marks=slow),
        *(
            pytest.param(precision, name, devices, marks=slow)
            for precision in ("float16", "bfloat16")
            for name, devices in (("cnn", 2), ("cnn", 3), ("gpt", 5))
        ),
    ],
)
def test_halves_compiled_as_users_do_give_the_same_bits(precision, name, devices, as_users_compile):  # noqa: F811
    halves_give_the_same_bits(precision, name, devices)


def halves_give_the_same_bits(precision, name, devices):
    one = problem(name)
    alone = train(one, 1, precision=precision)
    assert train(one, devices, precision=precision).bits == alone.bits
    assert alone.params != train(one, 1).params  # the option did something


def test_a_loss_scale_that_comes_down_comes_down_alike():
    # Large inputs overflow float16 at the first scales: steps are left out until one fits.
    one = problem("mlp")
    one = one._replace(data=ArrayDataset(one.data.inputs * 100, one.data.targets))
    alone = train(one, 1, precision="float16", epochs=4)
    assert train(one, 2, precision="float16", epochs=4).bits == alone.bits
    state = jax.tree.leaves(alone.end.state.sync)
    assert all(np.isfinite(leaf).all() for leaf in state)
