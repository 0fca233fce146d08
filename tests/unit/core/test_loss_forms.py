"""What a loss or a metric cannot be given, and functions that cannot be compiled, each in one line."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.facade import loss_and_output_grad
from cyxjax.core.objective.forms import check_form
from cyxjax.core.objective.task import picked
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.checks.batch_checks import BatchChecks, check_batches
from cyxjax.train.feeding.fit_data import FitData

X, Y = np.ones((8, 3), np.float32), np.arange(8, dtype=np.int32) % 3
OUTPUT = jax.ShapeDtypeStruct((2, 3), jnp.float32)
HERE = re.escape(Path(__file__).name)


def by_numpy(output, target):
    return np.mean(np.asarray(output)) + 0 * target


def by_float(output, target):
    return float(output.mean())


def by_item(output, target):
    return output.mean().item()


def by_if(output, target):
    return output.mean() if output.mean() > 0 else 0.0


def checked(loss, output=OUTPUT, **metrics):
    data = FitData(cx.data.as_dataset((X, Y)), None, True)
    checks = BatchChecks(lambda inputs: output, loss, cx.Metrics(metrics), 2, 4, False)
    check_batches(data, checks)


@pytest.mark.parametrize("fn", [by_numpy, by_float, by_item, by_if])
def test_a_function_that_asks_for_numbers_is_told_where(fn):
    asks = rf".*{HERE}:\d+.*numpy"
    with pytest.raises(ConfigError, match=f"loss {asks}") as caught:
        checked(cx.Task(fn).to_per_example())
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"metric 'own' {asks}"):
        checked(cx.CrossEntropyLoss().per_example, own=fn)
    with pytest.raises(ConfigError, match=f"loss {asks}"):
        loss_and_output_grad(fn, jnp.ones((8, 3)), Y)


def test_a_metric_of_scikit_learn_is_told_what_to_do():
    metrics = pytest.importorskip("sklearn.metrics")
    with pytest.raises(ConfigError, match=r"metric 'f1' .*numpy.*trainer\.predict"):
        checked(cx.CrossEntropyLoss().per_example, f1=metrics.f1_score)


def test_what_a_loss_raises_for_shapes_and_types_is_said_with_both():
    def odd(output, target):
        return jnp.square(output - jnp.ones((5, 4))).mean(-1)

    given = r"output, an array float32\[4, 3\], with the target, an array int32\[4\]: TypeError: .* HINT"
    with pytest.raises(DataError, match=given) as caught:
        checked(cx.Task(odd).to_per_example())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", [cx.MSELoss(), cx.L1Loss(), cx.CrossEntropyLoss(), cx.BCEWithLogitsLoss()])
def test_no_loss_of_ours_takes_the_real_part_of_a_complex_number(loss):
    z, real = jnp.ones((2, 3), jnp.complex64), jnp.ones((2, 3))
    with pytest.raises(DataError, match=f"{type(loss).__name__}: .*output .*complex64"):
        loss.forward(z, real)
    with pytest.raises(DataError, match=f"{type(loss).__name__}: .*target .*complex64"):
        loss.forward(real, z)


def test_a_rate_may_be_an_array_of_one_number():
    assert cx.SGDOptimizer(jnp.float32(0.5)).lr == 0.5
    assert cx.AdamOptimizer(np.float64(0.25)).lr == 0.25


def test_a_traced_array_is_called_an_array():
    with pytest.raises(DataError, match=r"'logits' .*float32\[2, 3\]"):
        jax.eval_shape(lambda output: picked(output, "logits"), OUTPUT)
    with pytest.raises(DataError, match="loss .*None"):
        check_form(None, 2)
