"""The place of a stream: a run that was cut goes on with the next unseen sample, and reads none again."""

import itertools
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cyxjax.core.trees import named_leaves
from cyxjax.data.streams import Reader, RowBatches, Rows, packed, unpacked
from cyxjax.errors import CheckpointError
from cyxjax.train.feeding.stream_positions import StreamPositions
from cyxjax.train.hooks.hook import Position
from tests.support.trainers import X, Y, config, trainer, use_devices


@pytest.fixture(autouse=True)
def one_device(own_group):
    use_devices(1)


def bits(one):
    return [leaf.tobytes() for _, leaf in named_leaves(one.params)]


class Batches:
    """60 samples in 5 batches, drawn anew in each pass by a hidden state that only a place can tell.

    Its iterators say their place as grain's do. `read` counts batches that were made.
    """

    def __init__(self):
        self.read = 0

    def __iter__(self):
        return Drawing(self)


class Drawing:
    def __init__(self, of):
        self.of, self.number = of, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == 5:
            raise StopIteration
        rows = np.arange(12 * self.number, 12 * self.number + 12)
        self.number += 1
        self.of.read += 1
        return X[rows], Y[rows]

    def get_state(self):
        return {"number": self.number, 7: (b"bytes", np.int64(3))}

    def set_state(self, state):
        assert state[7] == (b"bytes", 3)
        self.number = state["number"]


class OfItself(Batches):
    """The loader itself knows its place, as a StatefulDataLoader does."""

    number = None

    def __iter__(self):
        self.live = Drawing(self)
        if self.number is not None:
            self.live.number, self.number = self.number, None
        return (batch for batch in self.live)

    def state_dict(self):
        return {"number": self.live.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Samples:
    """A stream of single samples without a place; `asked` counts them."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        for x, y in zip(X, Y, strict=True):
            self.asked += 1
            yield x, y


@pytest.mark.parametrize(("make", "steps"), [(Batches, 2), (OfItself, None)], ids=["steps", "passes"])
def test_a_loader_that_knows_its_place_is_read_on_from_there(tmp_path, make, steps):
    more = {"steps_per_epoch": steps, "epochs": 4 if steps else 2, "prefetch": 0}
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    whole, first, second = trainer(), trainer(), trainer()
    whole.fit(make(), config(**more))
    first.fit(make(), (X, Y), config(max_steps=3, **more, **kept))  # validated by number
    loader = make()
    second.fit(loader, (X, Y), config(**more, **kept))
    assert bits(whole) == bits(second)
    # One batch was looked at before training; then those after the third, and none before it.
    assert loader.read == 1 + (8 if steps else 10) - 3


def test_a_place_before_a_short_batch_is_gone_on_from(tmp_path):
    class Short(Batches):
        def __iter__(self):
            return ShortDrawing(self)

    class ShortDrawing(Drawing):
        def __next__(self):
            x, y = super().__next__()
            return (x[:5], y[:5]) if self.number == 5 else (x, y)

    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    whole, second = trainer(), trainer()
    whole.fit(Short(), config(steps_per_epoch=6))
    trainer().fit(Short(), config(steps_per_epoch=6, max_steps=4, **kept))
    second.fit(Short(), config(steps_per_epoch=6, **kept))  # "a batch of 12 samples after one of at most 5"
    assert bits(whole) == bits(second)


def test_a_run_without_its_place_would_read_others(tmp_path):
    # Not vacuous: where the place is not kept, batches are passed over, and are read again.
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto", "prefetch": 0}

    class Unknown(Batches):
        def __iter__(self):
            return (batch for batch in Drawing(self))

    trainer().fit(Unknown(), config(max_steps=3, **kept))
    loader = Unknown()
    trainer().fit(loader, config(**kept))
    assert loader.read == 1 + 10


def test_single_samples_are_batched_and_gone_on_from(tmp_path):
    arrays, rows, cut, again = trainer(), trainer(), trainer(), trainer()
    arrays.fit(X, Y, config(shuffle=False))
    rows.fit(Rows(Samples()), config())
    assert bits(arrays) == bits(rows)
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    cut.fit(Rows(Samples()), config(max_steps=17, **kept))
    again.fit(Rows(Samples()), config(batch_size=4, **kept))
    assert bits(again) == bits(arrays)


def test_a_loader_that_takes_no_place_is_refused(tmp_path):
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    trainer().fit(Batches(), config(max_steps=2, **kept))
    plain = [(X[i : i + 12], Y[i : i + 12]) for i in range(0, 60, 12)]

    class Plain:
        def __iter__(self):
            return iter(plain)

    with pytest.raises(CheckpointError, match="Plain"):
        trainer().fit(Plain(), config(**kept))


def test_places_of_ranks_are_their_own_and_not_cut_anew():
    meta = {"stream_places": {"at": [0, 3, 36], "shared": False, "ranks": ["a", "b"]}}
    positions = StreamPositions()
    positions.restore(meta, 1, 2)
    assert positions.before(Position(3, 0, 36, 3)).place == "b"
    assert positions.before(Position(2, 0, 24, 2)) is None  # of before it
    assert positions.before(Position(9, 1, 12, 1)) is None  # of another epoch
    with pytest.raises(CheckpointError, match="2 ranks .* 3"):
        StreamPositions().restore(meta, 0, 3)
    shared = StreamPositions()
    shared.restore({"stream_places": meta["stream_places"] | {"shared": True}}, 2, 3)
    assert shared.before(Position(3, 0, 36, 3)).place == "a"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_that_share_a_stream_take_each_sample_once_and_go_on_at_any_number(world):
    # Two steps of 6 samples on two ranks; the rest on another number of them.
    loaders = [RowBatches(Rows(range(20)), 3, rank, 2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    seen = [x for it in iterators for x, _ in itertools.islice(it, 2)]
    state = unpacked(packed(iterators[0].get_state()))
    assert state == iterators[1].get_state()
    rest = [iter(RowBatches(Rows(range(20)), 6 // world, rank, world)) for rank in range(world)]
    for it in rest:
        it.set_state(state)
        seen += [x for x, _ in it]
    assert sorted(np.concatenate(seen).tolist()) == list(range(20))


def test_a_source_may_fill_one_array_anew():
    one = np.zeros(2)

    def source():
        for i in range(4):
            one[:] = i
            yield {"x": one, "more": (one, [one])}

    (batch, _), *_ = RowBatches(Rows(list_of(source)), 4, 0, 1)
    for leaf in jax.tree.leaves(batch):
        np.testing.assert_array_equal(leaf.reshape(4, -1)[:, 0], np.arange(4.0))


def list_of(make):
    """Something that begins anew with each pass."""
    return type("Source", (), {"__iter__": lambda self: make()})()


def test_what_no_json_holds_is_no_place():
    class Odd:
        def get_state(self):
            return object()

        set_state = None

        def __next__(self):
            raise StopIteration

        def __iter__(self):
            return self

    assert Reader(Odd()).place() is None
    value = {"a": [1, (2, None)], 3: b"x", "n": np.arange(3, dtype=np.uint32)}
    back = unpacked(packed(value))
    assert (back["a"], back[3], back["n"].tolist(), back["n"].dtype) == (
        [1, (2, None)],
        b"x",
        [0, 1, 2],
        np.uint32,
    )


# ---- the libraries themselves, where they are installed ----------------------------------------------


def grain_batches():
    grain = pytest.importorskip("grain", reason="pip install 'cyxjax[grain]'")
    source = [(X[i], np.int32(Y[i])) for i in range(60)]
    return grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset().batch(12)


def grain_loader(workers=0):
    grain = pytest.importorskip("grain.python", reason="pip install 'cyxjax[grain]'")
    source = [(X[i], np.int32(Y[i])) for i in range(60)]
    sampler = grain.IndexSampler(60, grain.NoSharding(), shuffle=True, num_epochs=1, seed=2)
    return grain.DataLoader(
        data_source=source, sampler=sampler, operations=[grain.Batch(12)], worker_count=workers
    )


def grain_workers():
    grain = pytest.importorskip("grain", reason="pip install 'cyxjax[grain]'")
    source = [(X[i], np.int32(Y[i])) for i in range(60)]
    rows = grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset()
    return Rows(rows.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=1)))


def hugging_face():
    datasets = pytest.importorskip("datasets", reason="pip install 'cyxjax[hf]'")
    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    return table.to_iterable_dataset(num_shards=4)


def hugging_face_shuffled():
    return hugging_face().shuffle(seed=3, buffer_size=20)


def torch_rows():
    torch_data = sys.modules.get("torch.utils.data") or pytest.importorskip(
        "torch.utils.data", reason="pip install torch"
    )

    class Stream(torch_data.IterableDataset):
        def __iter__(self):
            return zip(X, Y, strict=True)

    return Stream()


def test_a_stream_of_torchs_gives_single_samples(monkeypatch):
    class IterableDataset:  # as torch's: it has an index, which raises
        def __getitem__(self, index):
            raise NotImplementedError

    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(IterableDataset=IterableDataset))
    stream, arrays = trainer(), trainer()
    stream.fit(torch_rows(), torch_rows(), config())
    arrays.fit(X, Y, X, Y, config(shuffle=False))
    assert bits(stream) == bits(arrays)
    assert stream.history.val_losses == pytest.approx(arrays.history.val_losses)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        *((grain_batches, 4), (grain_loader, None), (hugging_face, 4), (hugging_face_shuffled, None)),
        *((torch_rows, 4), pytest.param(grain_workers, None, marks=pytest.mark.slow)),
    ],
)
def test_streams_of_other_libraries_go_on_where_they_were_cut(tmp_path, make, steps):
    more = {"steps_per_epoch": steps, "epochs": 3, "batch_size": 12}
    kept = {"checkpoint_every_n_steps": 1, "checkpoint_dir": str(tmp_path), "resume": "auto"}
    whole, first, second = trainer(), trainer(), trainer()
    expected = whole.fit(make(), config(**more))
    first.fit(make(), config(max_steps=7, **more, **kept))
    history = second.fit(make(), config(**more, **kept))
    assert bits(whole) == bits(second)
    assert history.train_losses == expected.train_losses
    assert history.num_steps == (12 if steps else 15)
