"""Labels that name no class: refused by value and sample, wherever they are read from."""

import jax
import numpy as np
import pytest

from cyxjax.core.mesh import build_mesh, put_rows
from cyxjax.data.labels import WatchedDataset, check_labels, watched
from cyxjax.data.sources import ArrayDataset, Subset, as_dataset
from cyxjax.errors import DataError, WrappingError
from tests.support.trainers import config, trainer

X = np.zeros((40, 6), np.float32)
WRAPS = 2**32 + 1  # its low 32 bits are 1: a class there is
OUTPUT = jax.ShapeDtypeStruct((1, 3), np.float32)
TARGET = jax.ShapeDtypeStruct((1,), np.int64)


def labels(wrong):
    found = np.arange(40) % 3
    found[17] = wrong
    return found


def samples(wrong):
    return list(zip(X, labels(wrong), strict=True))


@pytest.mark.parametrize("wrong", [-1, 3, WRAPS])
def test_a_label_is_refused_in_arrays_in_a_part_of_them_and_item_by_item(wrong):
    said = f"data: sample 17 .*label {wrong}.* 3 outputs"
    with pytest.raises(DataError, match=said):
        check_labels(ArrayDataset(X, labels(wrong)), OUTPUT, TARGET, "data")
    part = Subset(ArrayDataset(X, labels(wrong)), np.arange(10, 40))
    assert watched(part) is part
    with pytest.raises(DataError, match=f"sample 7 .*label {wrong}"):
        check_labels(part, OUTPUT, TARGET, "data")
    items = watched(as_dataset(samples(wrong)))
    assert isinstance(items, WatchedDataset)
    check_labels(items, OUTPUT, TARGET, "data")
    items.take(np.array([0, 39, 16]))
    with pytest.raises(DataError, match=said):
        items.take(np.array([0, 17]))


def test_what_is_no_label_is_left_alone():
    quantities = ArrayDataset(X, np.full(40, 7.5, np.float32))
    check_labels(quantities, OUTPUT, jax.ShapeDtypeStruct((1,), np.float32))
    check_labels(ArrayDataset(X, labels(77)), jax.ShapeDtypeStruct((1,), np.float32), TARGET)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("wrong", [-1, 3, WRAPS])
@pytest.mark.parametrize("kind", ["arrays", "held out", "items"])
def test_a_fit_refuses_it(kind, wrong):
    data = (samples(wrong), samples(0)) if kind == "items" else (X, labels(wrong))
    split = 0.25 if kind == "held out" else 0.0
    with pytest.raises(DataError, match=rf"sample \d+ .*label {wrong}.* 3 outputs"):
        trainer().fit(*data, config(validation_split=split))


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.int64, 2**31), (np.int64, -(2**31) - 1), (np.uint64, 2**32)], ids=str
)
def test_values_that_jax_would_cut_are_refused_before_they_reach_a_device(dtype, value):
    mesh, rows = build_mesh(jax.devices()[:2]), np.full((4, 3), 2**31 - 1, dtype)
    assert np.array_equal(put_rows(mesh, rows), rows)
    rows[2, 1] = value
    with pytest.raises(WrappingError, match=f"row 2: {value} .*int32"):
        put_rows(mesh, {"tokens": rows})
