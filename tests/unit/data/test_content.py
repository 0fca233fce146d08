"""The fingerprint of a dataset: different data are detected, equal data are not."""

import json
import time

import ml_dtypes
import numpy as np
import pytest

from cyxjax.data import content
from cyxjax.data.content import MAX_RECORDS, content_of, find_difference
from cyxjax.data.sources import ArrayDataset, Subset, as_dataset

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 5)).astype(np.float32)
Y = RNG.integers(0, 10, 200).astype(np.int64)


def difference(a, b, **how):
    """The difference of two datasets after a JSON round trip, as between ranks and in a checkpoint."""
    return find_difference(*(json.loads(json.dumps(content_of(d))) for d in (a, b)), **how)


def test_equal_data_agree_and_between_hosts_also_what_another_processor_rounds_otherwise():
    assert difference(ArrayDataset(X, Y), ArrayDataset(X.copy(), Y.copy())) is None
    rounded = X.copy()
    rounded[100, 2] = np.nextafter(X[100, 2], np.float32(9))
    for other in (rounded, np.nextafter(X, 9, dtype=np.float32)):
        assert difference(ArrayDataset(X, Y), ArrayDataset(other, Y), to_the_bit=False) is None
        what, mine, its = difference(ArrayDataset(X, Y), ArrayDataset(other, Y))
        assert what in ("sample 0", "the bytes of all samples")
        assert mine != its


@pytest.mark.parametrize("to_the_bit", [True, False])
@pytest.mark.parametrize("length", [17, 784])
def test_two_samples_that_are_swapped_are_seen(length, to_the_bit):
    """Every byte counts at its position, for any sample length."""
    x = np.random.default_rng(0).integers(0, 256, (3000, length)).astype(np.uint8)
    other = x.copy()
    other[[1234, 2345]] = x[[2345, 1234]]
    assert difference(ArrayDataset(x, x), ArrayDataset(other, other), to_the_bit=to_the_bit) is not None
    floats = [ArrayDataset(a.astype(np.float32), a) for a in (x, other)]
    assert difference(*floats)[0] == "the bytes of all samples"


def test_whole_slices_that_are_swapped_are_seen():
    x = np.random.default_rng(0).integers(0, 256, (8, 1 << 20)).astype(np.uint8)  # a sample is a slice
    assert content.digest(x) != content.digest(x[[0, 1, 2, 3, 4, 7, 6, 5]])


def test_one_byte_of_40_megabytes_is_seen_in_memory_and_in_a_mapped_file(tmp_path):
    x = np.arange(10_000_000, dtype=np.int32).reshape(10_000, 1000)
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.int32, "r", shape=x.shape)
    assert difference(ArrayDataset(x, x), ArrayDataset(mapped, mapped)) is None
    other = x.copy()
    other.view(np.uint8).reshape(-1)[23_456_789] ^= 1
    assert difference(ArrayDataset(mapped, mapped), ArrayDataset(other, other)) is not None


def test_large_mapped_files_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "MAX_MAPPED_BYTES", X.nbytes - 1)
    X.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=X.shape)
    found = content_of(ArrayDataset(np.asarray(mapped)[:], Y))
    assert ("bytes" in found, len(found["records"])) == (False, MAX_RECORDS)
    assert "bytes" in content_of(ArrayDataset(X, Y))


def test_subsets_and_views_are_read_whole_by_the_samples_that_are_theirs():
    rows = np.sort(RNG.permutation(200)[:150])
    part = Subset(Subset(ArrayDataset(X, Y), rows), np.arange(100))
    assert content_of(part) == content_of(ArrayDataset(X[rows[:100]], Y[rows[:100]]))
    outside = X.copy()
    outside[rows[120]] += 1
    assert difference(part, Subset(ArrayDataset(outside, Y), rows[:100])) is None
    for view in (X[:, ::2], X[::-1], X[:, :, None]):
        assert difference(ArrayDataset(view, Y), ArrayDataset(np.ascontiguousarray(view), Y)) is None


def test_what_a_checkpoint_of_0_2_0_holds_is_compared_by_its_samples_alone():
    """Such a checkpoint has sums under "whole", and no checksums of floats."""
    then, now = (content_of(ArrayDataset(X, Y)) for _ in range(2))
    del then["bytes"]
    then["whole"] = [["float32[200,5]", 1.0, 2.0], ["int64[200]", 12345]]
    then["records"] = {i: [leaf[:3] for leaf in record] for i, record in then["records"].items()}
    assert find_difference(then, now) is None
    assert find_difference(then, content_of(ArrayDataset(X + 1, Y)))[0] == "sample 0"


@pytest.mark.parametrize(
    "other",
    [X * 1.01, X[:, ::-1], X[::-1], X.astype(np.float64), X + 1e-3, np.where(X > 2, 0, X), X[:150]],
    ids=["scaled", "columns", "rows", "dtype", "shifted", "some", "fewer"],
)
def test_other_inputs_are_seen(other):
    found = difference(ArrayDataset(X, Y), ArrayDataset(np.ascontiguousarray(other), Y[: len(other)]))
    assert found is not None
    if len(other) < 200:
        assert found == ("the number of samples", "200", "150")


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


class Flips(Items):
    """Each second sample is as it was."""

    def __getitem__(self, i):
        x, label = super().__getitem__(i)
        return (x if self.rng.random() < 0.5 else -1 - x), label


def test_an_augmentation_that_leaves_samples_as_they_are_is_no_difference():
    assert difference(as_dataset(Flips()), as_dataset(Flips())) is None
    assert difference(as_dataset(Flips()), as_dataset(Flips(label=1)))[1:] == ("int64[1] 0", "int64[1] 1")


def test_what_is_drawn_anew_at_each_read_is_left_out_and_the_rest_compared():
    noisy = [as_dataset(Items(noise=1.0)) for _ in range(2)]
    assert difference(*noisy) is None
    assert difference(noisy[0], as_dataset(Items())) is None  # a random read that gave the same twice
    assert content.drawn_anew(content_of(noisy[0]))[0] == "0"
    assert not content.drawn_anew(content_of(as_dataset(Items())))
    what, mine, its = difference(noisy[0], as_dataset(Items(noise=1.0, label=1)))
    assert (what, mine, its) == ("sample 0", "int64[1] 0", "int64[1] 1")


def test_few_records_are_read_and_fewer_of_slow_ones(monkeypatch):
    quick = Items()
    assert content_of(as_dataset(quick))["records"]["999"] is None  # no error here
    assert 2 * (MAX_RECORDS - 1) <= quick.reads <= 2 * MAX_RECORDS
    monkeypatch.setattr(content, "MAX_S", 0.1)
    slow = content_of(as_dataset(Items(wait_s=0.03)))
    assert 1 <= len(slow["records"]) <= 4  # two reads each
    assert find_difference(content_of(as_dataset(quick)), slow) is None  # on the records that both have read


@pytest.mark.parametrize("size", [0, 1, 17, 40])
def test_floats_of_a_sample_come_to_a_weighted_sum(size):
    # weights 1, 2, ..., 17, 1, 2, ...; 0.5 at each place; NaN counts as 0
    values = np.full(size + 1, 0.5, np.float32)
    values[0] = np.nan
    found = content_of(ArrayDataset(values[None], values[None]))
    expected = 0.5 * sum(1 + place % 17 for place in range(1, size + 1))
    assert found["records"]["0"][0][:3] == [f"float32[1,{size + 1}]", expected, 0.5 * size * 17]


def test_a_change_that_two_periodic_sums_would_not_show_is_found() -> None:
    values = np.random.default_rng(0).normal(size=(30, 34)).astype(np.float32)
    with_nan, with_zero = values.copy(), values.copy()
    with_nan[:, 5], with_zero[:, 5] = np.nan, 0
    pairs = [
        (values, np.roll(values, 17, 1)),  # columns 17 apart exchanged
        (with_nan, with_zero),
        (values + 1j, values - 1j),
    ]
    for a, b in pairs:
        contents = [content_of(as_dataset((x, np.arange(30)))) for x in (a, b)]
        assert find_difference(*contents, to_the_bit=False) is not None


def test_bfloat16_with_nan_is_compared() -> None:
    one = np.ones((30, 3), ml_dtypes.bfloat16)
    one[0, 0] = np.nan
    other = one.copy()
    other[1:] = 2
    contents = [content_of(as_dataset((x, np.arange(30)))) for x in (one, other)]
    assert find_difference(*contents, to_the_bit=False) is not None
