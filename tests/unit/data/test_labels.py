"""Labels that name no class: refused by value and sample in arrays; else their loss is NaN."""

import jax
import numpy as np
import pytest

from cyxjax.core.mesh import build_mesh, put_rows
from cyxjax.data.labels import check_labels
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import DataError, NonFiniteError, WrappingError
from tests.support.trainers import batches, config, trainer

X = np.zeros((40, 6), np.float32)
WRAPS = 2**32 + 1  # its low 32 bits are 1: a class there is
OUTPUT = jax.ShapeDtypeStruct((1, 3), np.float32)
TARGET = jax.ShapeDtypeStruct((1,), np.int64)


def labels(wrong):
    found = np.arange(40) % 3
    found[17] = wrong
    return found


def test_what_is_no_label_is_left_alone():
    quantities = ArrayDataset(X, np.full(40, 7.5, np.float32))
    check_labels(quantities, OUTPUT, jax.ShapeDtypeStruct((1,), np.float32))
    check_labels(ArrayDataset(X, labels(77)), jax.ShapeDtypeStruct((1,), np.float32), TARGET)


GOOD = np.arange(40) % 3
ARRAYS = {  # by whom -> (the call, what is named)
    "a fit": (lambda t, y: t.fit(X, y, config()), "training data: sample 17"),
    "held out": (lambda t, y: t.fit(X, y, config(validation_split=0.25)), r"data: sample \d+"),
    "validation": (lambda t, y: t.fit(X, GOOD, X, y, config()), "validation data: sample 17"),
    "evaluated": (lambda t, y: t.evaluate(X, y), "data: sample 17"),
}


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("wrong", [-1, 3, WRAPS])
@pytest.mark.parametrize("given", ARRAYS)
def test_a_fit_and_an_evaluation_of_arrays_refuse_it(given, wrong):
    call, said = ARRAYS[given]
    with pytest.raises(DataError, match=f"{said} .*label {wrong}.* 3 outputs"):
        call(trainer(), labels(wrong))


READ = {  # one by one, or in batches
    "items": lambda y: list(zip(X, y, strict=True)),
    "loader": lambda y: batches(X, y, 8),
}


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("wrong", [-1, 3])
@pytest.mark.parametrize("read", READ)
def test_what_is_read_bit_by_bit_has_no_loss_with_it(read, wrong):
    odd, good = READ[read](labels(wrong)), READ[read](GOOD)
    with pytest.raises(NonFiniteError, match="step [1-5] .*labels"):
        trainer().fit(odd, config(shuffle=False))
    assert np.isnan(trainer().fit(good, odd, config()).val_losses[0])
    assert np.isnan(trainer().evaluate(odd)[0])


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.int64, 2**31), (np.int64, -(2**31) - 1), (np.uint64, 2**32)], ids=str
)
def test_values_that_jax_would_cut_are_refused_before_they_reach_a_device(dtype, value):
    mesh, rows = build_mesh(jax.devices()[:2]), np.full((4, 3), 2**31 - 1, dtype)
    assert np.array_equal(put_rows(mesh, rows), rows)
    rows[2, 1] = value
    with pytest.raises(WrappingError, match=f"row 2: {value} .*int32"):
        put_rows(mesh, {"tokens": rows})
