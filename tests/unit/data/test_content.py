"""What a data set holds, in a few numbers: other data are told apart, the same are not."""

import json
import time

import numpy as np
import pytest

from cyxjax.data.content import MAX_RECORDS, content_of, find_difference, read_otherwise
from cyxjax.data.sources import ArrayDataset, as_dataset

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 5)).astype(np.float32)
Y = RNG.integers(0, 10, 200).astype(np.int64)


def difference(a, b):
    """Of two datasets, after a way through JSON, as between ranks and in a checkpoint."""
    return find_difference(*(json.loads(json.dumps(content_of(d))) for d in (a, b)))


def test_equal_data_agree_and_so_does_what_another_processor_rounds_otherwise():
    assert difference(ArrayDataset(X, Y), ArrayDataset(X.copy(), Y.copy())) is None
    rounded = X.copy()
    rounded[100, 2] = np.nextafter(X[100, 2], np.float32(9))
    assert difference(ArrayDataset(X, Y), ArrayDataset(np.nextafter(X, 9, dtype=np.float32), Y)) is None
    contents = [content_of(ArrayDataset(x, Y)) for x in (X, rounded, X.copy())]
    assert find_difference(contents[0], contents[2], to_the_bit=True) is None
    what, mine, its = find_difference(*contents[:2], to_the_bit=True)  # a rounding of one value of 1000
    assert what == "the values of all samples"
    assert mine != its


def test_one_label_among_all_is_seen_where_arrays_are_in_memory():
    other = Y.copy()
    other[77] += 1
    what, mine, its = difference(ArrayDataset(X, Y), ArrayDataset(X, other))
    assert what in ("sample 77", "the values of all samples")
    assert mine != its


def test_a_sample_that_differs_is_named_with_both_values():
    other = Y.copy()
    other[0] = 77
    assert difference(ArrayDataset(X, Y), ArrayDataset(X, other)) == (
        "sample 0",
        f"int64[1] {Y[0]}",
        "int64[1] 77",
    )


@pytest.mark.parametrize(
    "other",
    [X * 1.01, X[:, ::-1], X[::-1], X.astype(np.float64), X + 1e-3, np.where(X > 2, 0, X)],
    ids=["scaled", "columns", "rows", "dtype", "shifted", "some"],
)
def test_other_inputs_are_seen(other):
    assert difference(ArrayDataset(X, Y), ArrayDataset(np.ascontiguousarray(other), Y)) is not None


def test_other_words_of_the_same_numbers_are_seen_and_what_kept_none_is_not_compared():
    words = content_of(ArrayDataset(X, Y, ("no", "yes")))
    what, first, second = find_difference(words, content_of(ArrayDataset(X, Y, ("no", "yep"))))
    assert (what, first[:8], second[:8]) == ("the classes of labels that are words", "no, yes ", "no, yep ")
    assert find_difference(words, content_of(ArrayDataset(X, Y)))[2] == "none"
    del words["classes"]  # of a version before
    assert find_difference(words, content_of(ArrayDataset(X, Y, ("no", "yep")))) is None


def test_more_samples_are_told_as_such():
    assert difference(ArrayDataset(X, Y), ArrayDataset(X[:150], Y[:150])) == (
        "the number of samples",
        "200",
        "150",
    )


class Items:
    """A user's dataset, read item by item."""

    def __init__(self, noise=0.0, wait_s=0.0, label=0):
        self.reads, self.noise, self.wait_s, self.label = 0, noise, wait_s, label
        self.rng = np.random.default_rng()

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        self.reads += 1
        time.sleep(self.wait_s)
        if i == 999:
            raise OSError("no such file")
        x = np.full(3, i, np.float32) + self.rng.normal(size=3).astype(np.float32) * self.noise
        return x, i % 7 + self.label


def test_what_is_drawn_anew_at_each_read_is_left_out_and_the_rest_compared():
    assert difference(as_dataset(Items(noise=1.0)), as_dataset(Items(noise=1.0))) is None
    what, mine, its = difference(as_dataset(Items(noise=1.0)), as_dataset(Items(noise=1.0, label=1)))
    assert (what, mine, its) == ("sample 0", "int64[1] 0", "int64[1] 1")


def test_a_sample_that_cannot_be_read_is_no_error_here():
    assert content_of(as_dataset(Items()))["records"]["999"] is None
    assert difference(as_dataset(Items()), as_dataset(Items())) is None


def test_few_records_are_read_and_fewer_of_slow_ones():
    quick, slow = Items(), Items(wait_s=0.3)
    content_of(as_dataset(quick))
    assert 2 * (MAX_RECORDS - 1) <= quick.reads <= 2 * MAX_RECORDS
    assert 1 <= len(content_of(as_dataset(slow))["records"]) <= 4  # two reads each, for a second
    assert difference(as_dataset(Items()), as_dataset(slow)) is None  # on what both have read


@pytest.mark.parametrize("size", [0, 1, 17, 40])
def test_floats_come_to_a_weighted_sum(size):
    # weights 1, 2, ..., 17, 1, 2, ...; 0.5 at each place; NaN counts as 0
    values = np.full(size + 1, 0.5, np.float32)
    values[0] = np.nan
    content = content_of(ArrayDataset(values[None], values[None]))
    expected = 0.5 * sum(1 + place % 17 for place in range(1, size + 1))
    assert content["whole"][0] == [f"float32[1,{size + 1}]", expected, 0.5 * size * 17]


class Padded:
    """Samples of 1 to 5 numbers, padded to the longest that is read with them, or to 5."""

    def __init__(self, length=None):
        self._length = length

    def __len__(self):
        return 30

    def take(self, indices):
        counts = np.asarray(indices) % 5 + 1
        longest = self._length or counts.max()
        return (np.arange(longest) < counts[:, None]).astype(np.float32), counts


def test_a_sample_that_depends_on_what_is_read_with_it_is_found():
    assert read_otherwise(Padded()) in range(30)
    assert read_otherwise(Padded(length=5)) is None
    assert read_otherwise(ArrayDataset(X, Y)) is None
