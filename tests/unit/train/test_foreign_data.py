"""User data (lists, frames, loaders, words) are read as intended, or refused with a hint."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.experimental import multihost_utils

import cyxjax as cx
from cyxjax.distributed import process_group
from cyxjax.errors import CheckpointError, ConfigError, DataError
from cyxjax.train.feeding import fit_data, loader_reader, loader_steps
from cyxjax.train.plan import fit_arguments, plan_of_checkpoint
from cyxjax.train.runs.tables import check_columns, check_names, check_vocabulary
from tests.support.resuming import bits
from tests.support.trainers import after_fit, config, loaded, same_bits, trainer, use_devices

pytestmark = pytest.mark.usefixtures("two_devices")

X = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)  # as in most fits of other tests
Y = np.arange(24) % 3
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]
NAMES = ("cat", "dog", "emu")
WORDS = np.array(NAMES)[Y]


def fit(*data, model=None, **values):
    return after_fit(*data, config(**{"epochs": 1} | values), model=model or linen.Dense(3))


# ---- lists and frames -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        BATCHES,  # used to train on three samples with eight labels each
        [{"x": x, "label": y} for x, y in BATCHES],
        [(x, np.eye(3)[y]) for x, y in BATCHES],
        [(x, x, y) for x, y in BATCHES],
        [[x, y] for x, y in BATCHES],
    ],
)
def test_a_list_of_batches_is_not_taken_for_samples(data):
    with pytest.raises(DataError, match=r"3 .*\(8, 6\) .*cx.data.Batches\(data\)"):
        fit_data.parse((data,), config())


@pytest.mark.parametrize(
    "sample",
    [(X[0], 1), (X[:2], 1), (X[0], Y[:4]), (X[:4], X[:4]), (np.ones((4, 4, 3)), Y[:16].reshape(4, 4)), X[:4]],
    ids=["class", "rows", "tokens", "again", "mask", "alone"],
)
def test_lists_of_samples_are_samples_and_two_of_them_training_and_validation_data(sample):
    assert len(fit_data.parse(([sample] * 3,), config())[0].train) == 3
    found, _ = fit_data.parse(([sample] * 3, [sample]), config())
    assert (len(found.train), len(found.val)) == (3, 1)


def test_predict_takes_lists_as_fit_does():
    one, pairs = fit(X, Y), list(zip(X, Y, strict=True))
    for data in (pairs, [{"x": x, "y": y} for x, y in pairs], list(X), X.tolist()):
        np.testing.assert_array_equal(one.predict(data), one.predict(X))


def test_arrays_of_the_other_byte_order_have_the_same_values():
    swapped, labels = X.astype(">f4"), Y.astype(">i8")
    one, batches = (
        fit(X, Y, shuffle=False, batch_size=4),
        [(swapped[i : i + 8], labels[i : i + 8]) for i in (0, 8, 16)],
    )
    assert bits(fit(swapped, labels, shuffle=False, batch_size=4)) == bits(one)
    assert bits(fit(cx.data.Batches(batches))) == bits(one)
    np.testing.assert_array_equal(one.predict(swapped), one.predict(X))


def test_batches_of_two_lengths_make_steps_but_not_one_step_together():
    tokens = [(np.ones((8, length), int), np.zeros((8, length), int)) for length in (4, 4, 2, 2, 2)]
    settings = {"model": linen.Embed(5, 3), "gradient_accumulation_steps": 2}
    assert fit(cx.data.Batches(tokens), **settings).history.num_steps == 3
    with pytest.raises(DataError, match=r"\(4,\).*\(2,\).*gradient_accumulation_steps"):
        fit(cx.data.Batches(tokens[1:]), **settings)


class Table:
    """The part of a frame that we read."""

    def __init__(self, **columns):
        self.found, self.columns = {name: np.asarray(one) for name, one in columns.items()}, list(columns)

    def __len__(self):
        return len(self.found[self.columns[0]])

    def __getitem__(self, name):
        return self.found[name]

    def to_numpy(self):
        raise AssertionError("columns are read one by one: one array would lose their dtypes")


FRAME = Table(**{f"c{i}": X[:, i] for i in range(6)})


@pytest.mark.parametrize(
    "names", [["y"], ["x", "y", "label", "b", "c", "d"], ["label", "x", "b", "c", "d", "e"]]
)
def test_predict_takes_a_frame_as_the_fit_did(names):
    inputs, labels = Table(**{name: X[:, i] for i, name in enumerate(names)}), Table(target=Y)
    one = fit(inputs, labels)
    np.testing.assert_array_equal(one.predict(inputs), one.predict(X[:, : len(names)]))
    features = {name: X[:, i] for i, name in enumerate("abcdef"[: len(names)])}
    alone = Table(**features, label=Y)
    two = fit(alone)
    for frame in (alone, Table(**features)):
        np.testing.assert_array_equal(two.predict(frame), two.predict(X[:, : len(names)]))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.tolist(), Y.tolist()),
        (list(X), Y.tolist()),
        (FRAME, Y),
        (FRAME, Y.tolist()),
        (FRAME, Table(price=Y)),
        (X, Y.tolist()),
    ],
)
def test_lists_and_frames_of_inputs_and_targets_are_a_pair(x, y):
    found, _ = fit_data.parse((x, y), config())  # the targets used to be taken for validation data
    inputs, targets = found.train.take(np.arange(24))
    assert found.val is None
    assert (inputs.tolist(), targets.tolist()) == (X.tolist(), Y.tolist())
    both, _ = fit_data.parse((x, y, x, y), config())
    assert both.val.take(np.arange(24))[1].tolist() == Y.tolist()


@pytest.mark.parametrize(
    "val", [cx.data.DataLoader((X[:8], Y[:8]), batch_size=3), list(zip(X[:8], Y[:8], strict=True))]
)
def test_inputs_and_targets_may_have_validation_data_of_another_kind(val):
    data, _ = fit_arguments((X, Y), None, val, {})
    found, _ = fit_data.parse(data, config())
    assert (len(found.train), len(found.val)) == (24, 8)


def test_two_tuples_are_training_and_validation_data_unless_they_may_be_inputs_and_targets():
    with pytest.raises(DataError):
        fit_data.parse(((X, X), (X, X)), config())
    for val in ((X, Y), (X[:8], Y[:8])):
        assert len(fit_data.parse(((X, Y), val), config())[0].val) == len(val[0])
    assert len(fit_data.parse(((X, X), (X[:8], X[:8])), config())[0].val) == 8
    several, _ = fit_data.parse((((X, X), (Y, Y)),), config())
    assert [len(part) for part in several.train.take(np.arange(3))] == [2, 2]
    both = (((X, X), (Y, Y)), ((X, X), (Y, Y)))
    assert [len(part) for part in fit_data.parse(both, config())[0].val.take(np.arange(3))] == [2, 2]
    for data in ((X, Y), ((X, Y),)):
        given, _ = fit_arguments(data, None, (X, Y), {})
        assert len(fit_data.parse(given, config())[0].val) == 24


def test_a_frame_alone_gives_its_numbers_as_one_array():
    found = fit_data.parse((Table(a=X[:, 0], b=np.arange(24), label=Y),), config())[0].train
    inputs, targets = found.take(np.arange(24))  # one array a column: the model's IndexError
    assert inputs.tolist() == np.stack([X[:, 0], np.arange(24)], 1).tolist()
    assert targets.tolist() == Y.tolist()
    by_name = cx.data.as_dataset(Table(a=X[:, 0], b=Y, y=Y), inputs=["a", "b"]).take(np.arange(2))[0]
    assert set(by_name) == {"a", "b"}


@pytest.mark.parametrize(
    "column",
    [np.array(["red"] * 24, object), np.array([1.0, None] * 12, object), np.full(24, "2020-01-01", "M8[D]")],
)
def test_a_column_that_holds_no_numbers_is_named(column):
    for data in ((Table(a=column, b=X[:, 0]), Y), (Table(a=column, b=X[:, 0], label=Y),)):
        with pytest.raises(DataError, match="'a'"):
            fit_data.parse(data, config())


# ---- labels -----------------------------------------------------------------------------------------------


def test_booleans_are_the_labels_0_and_1():
    yes = Y == 1
    integers, booleans = (fit(X, y, X[:8], y[:8]).history for y in (yes.astype(np.int64), yes))
    assert booleans.train_losses == integers.train_losses
    assert booleans.val_losses == integers.val_losses
    assert booleans.val_accuracies == integers.val_accuracies
    items = [(x, bool(y)) for x, y in zip(X, yes, strict=True)]
    assert fit(items).history.train_losses == pytest.approx(integers.train_losses)


def test_rows_of_floats_are_probabilities_and_whole_numbers_and_words_are_refused():
    rows = np.eye(3)[Y]
    assert fit(X, rows).history.train_losses == pytest.approx(fit(X, Y).history.train_losses, rel=1e-5)
    with pytest.raises(DataError, match=r"argmax\(-1\)"):
        fit(X, rows.astype(int))
    for words in ((X, WORDS), (Table(a=X[:, 0], b=X[:, 1], label=WORDS.astype(object)),)):
        with pytest.raises(DataError, match=r"np\.unique\(y, return_inverse=True\)"):
            fit(*words)


def test_class_names_lie_in_checkpoints_and_other_names_are_refused(tmp_path):
    one, renamed = fit(X, Y), fit(X, Y, seed=3)
    before = renamed.params
    one.class_names, renamed.class_names = NAMES, ("ant", "dog", "emu")
    one.save_checkpoint(str(tmp_path / "saved"))
    assert loaded(tmp_path / "saved", model=linen.Dense(3)).class_names == NAMES
    with pytest.raises(CheckpointError, match=r"cat\W+dog\W+emu.* ant\W+dog\W+emu"):
        renamed.load_checkpoint(str(tmp_path / "saved"))
    assert same_bits(renamed.params, before)
    for found in (NAMES, (), ("0", "1", "2")):  # pandas numbers columns without names
        check_columns("more.parquet", found, NAMES)
    check_names("more.csv", "classes", NAMES, NAMES)
    for found in (NAMES[1:], (*NAMES, "fox"), ("dog", "cat", "emu"), ()):
        for one, two in ((found, NAMES), (NAMES, found)):
            with pytest.raises(ConfigError, match=r"more\.csv"):
                check_names("more.csv", "classes", one, two)
    with pytest.raises(ConfigError, match=r"more\.txt: .*'d'.*'c'"):
        check_vocabulary("more.txt", "abd", "abc")


# ---- loaders ----------------------------------------------------------------------------------------------


class Loader:
    """A torch-like loader: each iteration starts over, and `read` counts its batches.

    What it opens belongs to a thread, like a database's cursor; `opened` and `closed` count its iterators.
    """

    def __init__(self):
        self.read, self.opened, self.closed = [], 0, 0

    def __iter__(self):
        self.opened += 1
        return self.batches()

    def batches(self):
        thread = threading.get_ident()
        try:
            for number, batch in enumerate(BATCHES):
                assert threading.get_ident() == thread
                self.read.append(number)
                yield batch
        finally:
            self.closed += 1


class Persistent:
    """Like torch's with persistent_workers: one iterator object, which starts over each time."""

    persistent_workers = True

    def __init__(self):
        self.kept = Restarting()

    def __iter__(self):
        self.kept.left = iter(BATCHES)
        return self.kept


class Restarting:
    def __iter__(self):
        return self

    def __next__(self):
        return next(self.left)


class Filling:
    """One pair of arrays, overwritten for each batch of each pass."""

    x, y = map(np.empty_like, BATCHES[0])

    def __iter__(self):
        for self.x[:], self.y[:] in BATCHES:
            yield self.x, self.y


class FillingItems:
    kept = np.empty(6, np.float32)

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        self.kept[:] = X[i]
        return self.kept, Y[i]


def test_each_pass_over_a_loader_gives_its_batches_which_are_read_in_time():
    loader, val = Loader(), Loader()
    one = fit(loader, val, epochs=2)
    wanted = bits(one)
    assert (loader.read, loader.opened) == (val.read, val.opened) == ([0, 1, 2] * 2, 2)
    one.evaluate(val)
    one.predict(val)
    assert (val.read, val.opened) == ([0, 1, 2] * 4, 4)
    cut = fit(loader, max_steps=1, prefetch=0)
    assert (cut.history.num_steps, loader.opened, loader.closed) == (1, 3, 3)
    for both in (Persistent(), Filling(), cx.data.Batches(BATCHES)):
        again = fit(both, both, epochs=2, prefetch=0)
        assert (bits(again), again.history.val_losses) == (wanted, one.history.val_losses)
    three = {"gradient_accumulation_steps": 3}
    assert bits(fit(Filling(), **three)) == bits(fit(Loader(), **three))
    assert bits(fit(FillingItems())) == bits(fit(X, Y))


class Dry:
    """A loader that is empty, or has batches of `rows` samples, after a number of passes."""

    def __init__(self, passes, rows=0):
        self.passes, self.rest = passes, [(X[:rows], Y[:rows])] * bool(rows)

    def __iter__(self):
        self.passes -= 1
        return iter(BATCHES if self.passes >= 0 else self.rest)


@pytest.mark.parametrize(
    ("loader", "steps", "message"),
    [
        (cx.data.Rows(zip(X, Y, strict=True)), None, "zip"),  # used to train without the first samples
        (cx.data.Rows(zip(X, Y, strict=True)), 1, "zip"),
        (Dry(1), None, "epoch 2"),
        (Dry(1), 2, "steps_per_epoch"),
        (Dry(1, rows=7), None, "epoch 2 .*drop_last .* 8 "),
        (Dry(1, rows=7), 2, "pass 1.*steps_per_epoch"),  # used to read on for ever
    ],
)
def test_a_loader_that_runs_dry_is_an_error(loader, steps, message):
    with pytest.raises(DataError, match=message):
        fit(loader, epochs=9, steps_per_epoch=steps, drop_last=True)


def test_a_pass_with_fewer_batches_than_a_step_needs_is_an_error_where_short_steps_are_left_out():
    """It read one pass after another, without a step and without end."""
    options = {"steps_per_epoch": 2, "drop_last": True, "gradient_accumulation_steps": len(BATCHES) + 1}
    with pytest.raises(DataError, match="drop_last.* gradient_accumulation_steps=4"):
        fit(cx.data.Batches(BATCHES), **options)


ROWS = cx.data.Rows([*zip(X[:22], Y[:22], strict=True)])


# Of 22 samples, 8 in each step: what is left are 6 samples, or a batch of 4 and one of 2.
@pytest.mark.parametrize(("accumulation", "size"), [(1, 8), (2, 4)])
def test_drop_last_leaves_out_the_short_steps_of_loaders_too(accumulation, size):
    few = {"gradient_accumulation_steps": accumulation, "batch_size": size // 2}
    given = few | {"epochs": 2, "shuffle": False, "drop_last": True}
    wanted = bits(fit(X[:22], Y[:22], **given))
    short = cx.data.Batches(
        [(X[a : min(a + size, 22)], Y[a : min(a + size, 22)]) for a in range(0, 22, size)]
    )
    for loader in (short, ROWS, cx.data.DataLoader((X[:22], Y[:22]), size)):
        assert bits(fit(loader, **given)) == wanted
    # Who reads on takes the fifth batch too, with the next pass, where two make a step.
    given["steps_per_epoch"] = 2
    assert bits(fit(short, **given)) == bits(fit(ROWS, **given))


def test_a_rank_whose_loader_ran_out_has_finite_values_of_no_weight(monkeypatch):
    x, y = np.float32([[1, np.nan], [3, np.inf]]), np.float32([np.nan, 2])
    peers = iter([2, 2, 0])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: np.array([mine, next(peers)]))
    own, idle = loader_steps.agreed(loader_steps.steps(loader_reader.one_pass([(x, y)]), 1, 1))
    np.testing.assert_array_equal(own.inputs, x)
    assert (own.total, idle.total) == (4, 2)
    assert (idle.inputs.tolist(), idle.targets.tolist()) == ([[1, 0], [3, 0]], [0, 2])  # 0 * NaN is NaN
    assert (own.weight.tolist(), idle.weight.tolist()) == ([1, 1], [0, 0])


def test_batches_may_be_of_any_size_in_any_order():
    batches = [(X[a:b], Y[a:b]) for a, b in itertools.pairwise([0, 3, 16, 17])]
    linear = {"w": jnp.zeros((6, 3))}, lambda params, x: x @ params["w"]
    one = fit(cx.data.Batches(batches), model=linear, epochs=2)
    loss, _ = one.evaluate(cx.data.Batches(batches))
    assert loss == pytest.approx(one.evaluate(X[:17], Y[:17])[0], rel=1e-6)
    w = np.zeros((6, 3), np.float32)
    for x, y in batches * 2:
        raised = np.exp(x @ w)
        w -= 0.1 * x.T @ (raised / raised.sum(1, keepdims=True) - np.eye(3)[y]) / len(x)
    np.testing.assert_allclose(one.params["w"], w, rtol=1e-5, atol=1e-6)


def test_a_rate_that_follows_the_batch_wants_a_loader_that_tells_it():
    scaled = {"lr_scaling": "linear", "base_batch_size": 4}
    with pytest.raises(ConfigError, match="Loader .*batch_size.* global_batch_size"):
        fit_data.parse((Loader(),), config(**scaled, batch_size=None), 1, 1)
    settings = config(**scaled, batch_size=None, global_batch_size=8)
    assert fit_data.parse((Loader(),), settings, 1, 1)[1].global_batch_size == 8


def test_the_batch_of_a_loader_that_does_not_tell_it_is_not_made_up(capsys):
    one = fit(Loader(), verbose=True, batch_size=64)  # "64 samples ... = 64 per step"
    (plan,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Batch plan")]
    assert "first step of this process 8 samples" in plan
    assert "64" not in plan
    assert one.history.effective_batch_size == 8


@pytest.mark.parametrize(("stored", "size"), [(32, 2), (40, 3)])  # 16 parts: 40 samples are 3 each
def test_a_stored_batch_that_the_replicas_cannot_share_does_not_keep_a_model_from_being_loaded(stored, size):
    use_devices(8)
    given = {"gradient_accumulation_steps": 2, "global_batch_size": stored}
    meta = {"config": given, "inputs": {"": [[6], "float32"]}}
    plan = plan_of_checkpoint(trainer(linen.Dense(3)).recipe, process_group.ensure(), meta)
    assert plan.inputs.shape == (1, 6)
    assert plan.settings.step.batch == (size, 8, 2)
