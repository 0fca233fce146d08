"""Targets as people have them become labels, or are refused with the fix."""

import re

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.data.labels import WatchedDataset
from cyxjax.data.mixtures import Mixture
from cyxjax.data.sources import Subset, as_dataset
from cyxjax.data.targets.forms import form_of, refuse_words, with_form
from cyxjax.data.targets.naming import class_names_of, with_classes, with_names
from cyxjax.errors import DataError

X = np.zeros((4, 2), np.float32)
LABELS = np.array([2, 0, 1, 0])
WORDS = ["emu", "cat", "dog", "cat"]
HOT = np.eye(3)[LABELS]
CE = cx.CrossEntropyLoss()


class Shape:
    def __init__(self, *shape):
        self.shape = shape


class Categories:
    """What a pandas.Categorical has."""

    dtype, shape = "category", (4,)
    categories = ("emu", "dog", "cat")

    def __init__(self, codes=(0, 2, 1, 2)):
        self.codes = np.array(codes, np.int8)

    def __len__(self):
        return 4


@pytest.mark.parametrize(
    "words",
    [
        WORDS,
        np.array(WORDS),
        np.array(WORDS, object),
        np.array(WORDS, "S3"),
        np.array(WORDS, np.dtypes.StringDType()),
    ],
    ids=["list", "U", "object", "S", "StringDType"],
)
def test_words_are_numbered_in_the_order_of_their_names(words):
    found = as_dataset((X, words))
    assert (found.targets.tolist(), found.targets.dtype) == (LABELS.tolist(), np.int32)
    assert class_names_of(found) == ("cat", "dog", "emu")


def test_categories_keep_their_order():
    found = as_dataset((X, Categories()))
    assert (found.targets.tolist(), found.class_names) == ([0, 2, 1, 2], ("emu", "dog", "cat"))


def test_a_frame_of_pandas_with_a_category():
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    frame = pandas.DataFrame(
        {"a": X[:, 0], "b": X[:, 1], "label": pandas.Categorical(WORDS, ["emu", "dog", "cat"])}
    )
    found = as_dataset(frame)
    assert (found.targets.tolist(), found.class_names) == ([0, 2, 1, 2], ("emu", "dog", "cat"))
    assert as_dataset(frame.astype({"label": str})).class_names == ("cat", "dog", "emu")


@pytest.mark.parametrize("holed", [np.array(["a", None, "b", "b"], object), Categories((0, -1, 1, 1))])
def test_a_missing_label_is_refused_by_its_sample(holed):
    with pytest.raises(DataError, match="1 of 4 samples have no label, the first is 1"):
        as_dataset((X, holed))


@pytest.mark.parametrize("odd", [1, 2.5, ("a",)])
def test_what_is_no_word_among_words_is_named(odd):
    mixed = np.array(["a", None, "b", "b"], object)
    mixed[2] = odd
    said = rf"'a', and sample 2 has {re.escape(repr(odd))}, a {type(odd).__name__}\. HINT: make all words"
    with pytest.raises(DataError, match=said):
        as_dataset((X, mixed))


def test_words_of_other_data_count_in_the_first_table():
    other = as_dataset((X[:2], ["emu", "dog"]))
    assert with_classes(other, ("cat", "dog", "emu")).targets.tolist() == [2, 1]
    part = Subset(other, np.array([1]))
    assert class_names_of(with_classes(part, ("cat", "dog", "emu"))) == ("cat", "dog", "emu")
    with pytest.raises(DataError, match=r"'dog' is none of the 2 classes trained on \(cat, emu\)"):
        with_classes(other, ("cat", "emu"))


class Read:
    """Samples read when they are asked for, whose labels count in (emu, dog)."""

    class_names = ("emu", "dog")

    def __len__(self):
        return 3

    def take(self, indices):
        return X[indices], np.array([0, 1, 0])[indices]


def test_labels_that_are_read_later_are_numbered_as_they_come():
    table = ("cat", "dog", "emu")
    watched = with_classes(WatchedDataset(Read()), table)
    assert watched.take(np.arange(3))[1].tolist() == [2, 1, 2]
    assert with_classes(watched, table) is watched

    class Batches:
        class_names = ("emu", "dog")

        def __iter__(self):
            yield X[:2], np.array([0, 1])

    loader = with_classes(Batches(), table)
    assert class_names_of(loader) == table
    assert [targets.tolist() for _, targets in loader] == [[2, 1]]
    with pytest.raises(DataError, match=r"'dog' is none of the 2 classes trained on \(cat, emu\)"):
        with_classes(Read(), ("cat", "emu")).take(np.arange(3))


def test_numbers_take_the_names_they_are_given_and_no_others():
    numbers = as_dataset((X, LABELS))
    named = with_names(Subset(numbers, np.array([1, 3])), ("cat", "dog", "emu"))
    assert class_names_of(named) == ("cat", "dog", "emu")
    assert with_names(named, ("a", "b", "c")) is named
    assert with_names(numbers, ()) is numbers


def test_a_class_without_samples_need_not_be_known_and_a_near_one_is_named():
    few = as_dataset((X[:2], Categories((1, 1))))  # none is an "emu"
    assert with_classes(as_dataset((X, Categories((1, 1, 2, 2)))), ("cat", "dog")).targets.tolist() == [
        1,
        1,
        0,
        0,
    ]
    with pytest.raises(DataError, match=r"classes trained on \(cat, dogs\)\. HINT: did you mean 'dogs'\?"):
        with_classes(few, ("cat", "dogs"))
    with pytest.raises(DataError, match="HINT: leave its samples out, or train with them"):
        with_classes(few, ("x", "y"))


def test_a_mixture_counts_in_one_table():
    parts = [as_dataset((X[:2], ["emu", "dog"])), as_dataset((X, WORDS))]
    mixed = Mixture(parts, [1, 1])
    assert class_names_of(mixed) == ("cat", "dog", "emu")
    taken = mixed.take(np.arange(6))[1]
    assert set(taken[mixed._which == 0].tolist()) == {1, 2}  # not 0 and 1, as in its own table
    assert taken[mixed._which == 1].tolist() == [2, 0, 1][: int((mixed._which == 1).sum())]
    with pytest.raises(DataError, match="one with words as labels, such as 'cat', and a ArrayDataset"):
        Mixture([parts[1], (X, LABELS)], [1, 1])


def test_words_are_no_quantities():
    with pytest.raises(DataError, match="words, such as 'cat', and MSELoss"):
        refuse_words(as_dataset((X, WORDS)), cx.MSELoss())
    with pytest.raises(DataError, match="words, such as 'cat', and BCEWithLogitsLoss"):
        refuse_words(as_dataset((X, WORDS)), cx.BCEWithLogitsLoss())
    refuse_words(as_dataset((X[:2], ["no", "yes"])), cx.BCEWithLogitsLoss())  # 0 and 1


@pytest.mark.parametrize("kind", [np.int64, np.uint8, bool, np.float32, np.float64])
def test_one_hot_rows_are_labels(kind):
    data = as_dataset((X, HOT.astype(kind)))
    form = form_of(CE.per_example, data.targets, lambda: Shape(1, 3))
    assert with_form(data, form).targets.tolist() == LABELS.tolist()


def test_yes_and_no_are_labels_also_read_by_item():
    items = WatchedDataset(as_dataset([(X[i], np.bool_(LABELS[i] > 0)) for i in range(4)]))
    form = form_of(CE.per_example, items.take(np.arange(2))[1], lambda: Shape(1, 2))
    targets = with_form(items, form).take(np.arange(4))[1]
    assert (targets.tolist(), targets.dtype) == ([1, 0, 1, 0], np.int32)


def test_what_only_looks_like_one_hot_stays():
    output = lambda: Shape(1, 3, 5)  # noqa: E731  labels (B, 3) of three tokens
    assert form_of(CE.per_example, HOT.astype(int), output) is None
    assert form_of(cx.BCEWithLogitsLoss().per_example, HOT, lambda: Shape(1, 3)) is None
    weighed = cx.CrossEntropyLoss(weight=[1, 1, 5])
    assert form_of(weighed.per_example, HOT, lambda: Shape(1, 3)) is None  # torch's rule for probabilities
    soft = as_dataset((X, np.concatenate([HOT[:3], [[0.5, 0.5, 0]]])))
    form = form_of(CE.per_example, soft.targets[:3], lambda: Shape(1, 3))
    assert with_form(soft, form).targets is soft.targets  # some of its probabilities are 0 and 1


def test_a_row_of_two_classes_among_one_hot_rows_is_refused():
    odd = HOT.astype(int)
    odd[3, 1] = 1
    form = form_of(CE.per_example, odd[:3], lambda: Shape(1, 3))
    with pytest.raises(DataError, match=r"sample 3 is \[1, 1, 0\] .* BCEWithLogitsLoss"):
        with_form(as_dataset((X, odd)), form)


def test_numbers_kept_as_objects_are_numbers_and_ragged_ones_are_told():
    assert as_dataset((X.astype(object), LABELS.astype(object))).targets.tolist() == LABELS.tolist()
    ragged = np.empty(2, object)
    ragged[:] = [[1.0, 2.0], [3.0]]
    with pytest.raises(DataError, match="rows of unequal shape.*pad"):
        as_dataset((ragged, np.array([0, 1])))
