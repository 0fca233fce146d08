"""Labels that are not a class are refused by value and sample, on every path that reads them."""

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.mesh import build_mesh, put_rows
from cyxjax.data.labels import LabelCheck
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import DataError
from cyxjax.train.checks.batch_checks import expect_labels
from tests.support.trainers import batches, config, trainer

X = np.zeros((40, 6), np.float32)
WRAPS = 2**32 + 1  # its low 32 bits are 1: a class there is
OUTPUT = jax.ShapeDtypeStruct((1, 3), np.float32)
ONE = jax.ShapeDtypeStruct((1,), np.float32)
TARGET = jax.ShapeDtypeStruct((1,), np.int32)


def labels(wrong):
    found = np.arange(40) % 3
    found[17] = wrong
    return found


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("y", "looked"), [(np.full(40, 7.5, np.float32), (OUTPUT, ONE)), (labels(77), (ONE, TARGET))]
)
def test_what_is_no_label_is_left_alone(y, looked):
    expect_labels(LabelCheck(), ArrayDataset(X, y), looked, trainer()._recipe, "data")


def samples(y):
    return list(zip(X, y, strict=True))


def beside_others(y):
    """Labels and numbers of another meaning, as targets."""
    return {"label": y, "number": y * 0 + 77}


GOOD = np.arange(40) % 3
PICKS = cx.Task.classification(target="label")
READ = {  # reader -> (the call, the name in the error)
    "arrays": (lambda t, y: t.fit(X, y, config()), "training data: sample 17"),
    "held out": (lambda t, y: t.fit(X, y, config(validation_split=0.25)), "data: sample 17"),
    "items": (lambda t, y: t.fit(samples(y), samples(GOOD), config()), "training data: sample 17"),
    "items held out": (lambda t, y: t.fit(samples(y), config(validation_split=0.25)), "data: sample 17"),
    "loader": (lambda t, y: t.fit(batches(X, y, 8), config()), "training .*batch 2: sample 1"),
    "validation": (
        lambda t, y: t.fit(batches(X, GOOD, 8), batches(X, y, 8), config()),
        "validation .*batch 2: sample 1",
    ),
    "picked": (lambda t, y: t.fit(X, beside_others(y), config()), "data: sample 17"),
    "picked items": (
        lambda t, y: t.fit(samples(map(beside_others, y)), config()),
        "data: sample 17",
    ),
    "picked loader": (
        lambda t, y: t.fit(
            cx.data.Batches([(X[:8], beside_others(y[i : i + 8])) for i in (0, 8, 16)]), config()
        ),
        "batch 2: sample 1",
    ),
    "evaluated": (lambda t, y: t.evaluate(X, y), "data: sample 17"),
    "evaluated loader": (lambda t, y: t.evaluate(batches(X, y, 8)), "data: batch 2: sample 1"),
}


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("read", READ)
def test_a_fit_and_an_evaluation_refuse_it_wherever_it_is_read(read):
    (call, message), one = READ[read], trainer(loss=PICKS if "picked" in read else None)
    for wrong in (-1, 3, WRAPS):
        with pytest.raises(DataError, match=f"{message} .*label {wrong}.* 3 outputs"):
            call(one, labels(wrong))


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.int64, 2**31), (np.int64, -(2**31) - 1), (np.uint64, 2**32)], ids=str
)
def test_values_that_jax_would_cut_are_refused_before_they_reach_a_device(dtype, value):
    mesh, rows = build_mesh(jax.devices()[:2]), np.full((4, 3), 2**31 - 1, dtype)
    assert np.array_equal(put_rows(mesh, rows), rows)
    rows[2, 1] = value
    with pytest.raises(DataError, match=f"row 2: {value} .*int32"):
        put_rows(mesh, {"tokens": rows})
