"""Splits are disjoint, whole, and divide every class alike."""

import numpy as np
import pytest

from cyxjax.data.splits import split_rows, stratified_rows
from cyxjax.errors import ConfigError, DataError


def test_every_class_is_divided_in_the_fractions():
    # 70 of class 0, 20 of class 1, 10 of class 2, mixed: a tenth and a fifth of each, to the sample.
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [70, 20, 10]))
    parts = stratified_rows(labels, (0.7, 0.1, 0.2), seed=3)
    counts = [np.bincount(labels[rows], minlength=3).tolist() for rows in parts]
    assert counts == [[49, 14, 7], [7, 2, 1], [14, 4, 2]]
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert all((np.diff(rows) > 0).all() for rows in parts)


def test_the_seed_makes_the_split_and_nothing_else_does():
    labels = np.arange(60) % 3
    first, again, other = (stratified_rows(labels, (0.5, 0.5), seed=s) for s in (1, 1, 2))
    assert np.array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])


def test_quantities_are_no_classes():
    # As classes, each of these targets would be a class of one sample.
    train, val, test = split_rows(np.linspace(0, 1, 50), "regression")
    assert (len(train), len(val), len(test)) == (35, 5, 10)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match=r"\(0\.5, 0\.6\)"):
        stratified_rows(np.arange(9) % 3, (0.5, 0.6), 0)
    with pytest.raises(DataError, match="3 samples .*3 classes .*2 splits"):
        stratified_rows(np.arange(3), (0.9, 0.1), 0)
