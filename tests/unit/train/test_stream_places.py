"""The position of a stream: an interrupted run continues with the next unseen sample, and rereads none."""

import itertools
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import linen
from jax.experimental import multihost_utils

import cyxjax as cx
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.data.streams import RowBatches, Rows, as_rows, packed, unpacked
from cyxjax.errors import CheckpointError
from cyxjax.train.feeding import fit_data
from cyxjax.train.feeding.loader_reader import LoaderReader, passes
from cyxjax.train.feeding.loader_steps import steps
from cyxjax.train.feeding.predicting import source_of
from cyxjax.train.feeding.stream_positions import StreamPositions
from cyxjax.train.hooks.hook import Position
from tests.support.brought import Place, Stream
from tests.support.resuming import bits, check_goes_on, kept
from tests.support.trainers import X, Y, after_fit, config, loaded, trainer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("one_device")


class Batches(Stream):
    """60 samples in 5 batches, the last with `last` samples."""

    def __init__(self, last=12):
        rows = [slice(12 * i, 12 * i + (12 if i < 4 else last)) for i in range(5)]
        super().__init__([(X[part], Y[part]) for part in rows])


class OfItself(Batches):
    """The loader itself has the position, like a StatefulDataLoader."""

    number = None

    def __iter__(self):
        self.live = Place(self)
        if self.number is not None:
            self.live.number, self.number = self.number, None
        return (batch for batch in self.live)

    def state_dict(self):
        return {"number": self.live.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Shuffled(Batches):
    """The loader itself has the position, and a new iterator continues there, in the order of its pass."""

    at = 0, 0

    def __iter__(self):
        number, begin = self.at
        for i, part in enumerate(np.random.default_rng(number).permutation(len(self.items))[begin:], begin):
            self.read += 1
            self.at = number, i + 1
            yield self.items[part]
        self.at = number + 1, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Unknown(Batches):
    """The position is unknown: batches are read again and skipped."""

    def __iter__(self):
        return (batch for batch in Place(self))


class Samples:
    """A stream of single samples without a position, which overwrites one array."""

    def __iter__(self):
        buffer = np.empty_like(X[0])
        for x, y in zip(X, Y, strict=True):
            buffer[:] = x
            yield buffer, y


@pytest.mark.parametrize(
    ("make", "steps", "cut", "read"),
    [
        # One batch is read for its shapes; then those after the third, and none before it.
        (Batches, 2, 3, 1 + 8 - 3),
        (Batches, 2, 4, 1 + 8 - 4),  # where an epoch ends
        (OfItself, None, 3, 1 + 10 - 3),
        (OfItself, None, 5, 1 + 10 - 5),  # nothing is left there: the next pass starts over
        (Shuffled, None, 3, 1 + 10 - 3),
        (Shuffled, None, 5, 1 + 10 - 5),
        (Unknown, None, 3, 10),
        (Unknown, 2, 3, 8),
        (lambda: Batches(last=5), 6, 4, 1 + 24 - 4),  # read on from a short batch, padded as the others
    ],
    ids=[
        *("steps", "end", "passes", "end of a pass"),
        *("shuffled", "end of a shuffled pass", "unknown", "unknown steps", "short"),
    ],
)
def test_a_loader_that_knows_its_place_is_read_on_from_there(tmp_path, make, steps, cut, read):
    more = {"steps_per_epoch": steps, "epochs": 4 if steps else 2, "prefetch": 0}
    assert check_goes_on(tmp_path, make, cut, **more)[1].read == read


@pytest.mark.parametrize(
    ("size", "at", "begins", "warned"),
    [
        (16, Position(4, 1, earlier=32), 32, 0),
        (16, Position(5, 1, 8, 1, earlier=24), 32, 0),
        (24, Position(4, 1, earlier=32), 24, 1),  # no step ends after 32 samples
        (24, Position(4, 1, earlier=120), 24, 0),  # in the second pass, which begins after 96
        (16, Position(4, 1), 64, 0),  # a checkpoint of 0.2.0: four steps are skipped
    ],
)
def test_a_loader_without_a_place_continues_after_the_samples_of_all_epochs(size, at, begins, warned, capsys):
    rows = np.arange(96, dtype=np.float32)
    loader = cx.data.Batches([(rows[i : i + size], rows[i : i + size]) for i in range(0, 96, size)])
    reader = LoaderReader(loader, 1, accumulation=1, depth=0, steps_per_epoch=4)
    host, _ = next(reader.epoch(at))
    assert host.inputs[0] == begins
    assert capsys.readouterr().err.count("WARNING") == warned


def test_the_thread_of_a_reader_ends_with_it():
    before = set(threading.enumerate())
    reader = LoaderReader(Shuffled(), 1, accumulation=1, depth=2, steps_per_epoch=None)
    assert reader.first.total == 12
    assert set(threading.enumerate()) > before
    del reader  # as of a fit that was refused
    assert until(lambda: set(threading.enumerate()) <= before, 20)


def test_a_step_that_is_dropped_is_not_left_of_its_pass(tmp_path):
    more = {"epochs": 2, "drop_last": True, "gradient_accumulation_steps": 2}
    check_goes_on(tmp_path, Shuffled, 2, **more)  # the fifth batch is in no step


def test_a_stream_of_samples_with_a_state_keeps_it_between_two_epochs(tmp_path):
    def samples():
        stream = Shuffled()
        stream.items = list(zip(X[:60], Y[:60], strict=True))
        return Rows(stream)

    check_goes_on(tmp_path, samples, 5, epochs=2, batch_size=12)


def test_single_samples_are_batched_and_gone_on_from(tmp_path):
    arrays = after_fit(X, Y, config(shuffle=False), model=linen.Dense(3))
    assert bits(check_goes_on(tmp_path, lambda: Rows(Samples()), 17)[0]) == bits(arrays)
    given = config(batch_size=None, global_batch_size=12)
    assert fit_data.parse((Rows(Samples()),), given, 1, 2)[1] == given  # the same at any world size


def test_a_loader_that_takes_no_place_is_refused_and_places_are_json(tmp_path):
    trainer(linen.Dense(3)).fit(Batches(), config(max_steps=2, **kept(tmp_path)))
    with pytest.raises(CheckpointError, match="Unknown"):
        trainer(linen.Dense(3)).fit(Unknown(), config(**kept(tmp_path)))
    value = {"a": [1, (2, None)], 3: b"x", "n": np.arange(3, dtype=np.uint32)}
    back = unpacked(packed(value))
    assert (back.pop("n").tolist(), back) == (value.pop("n").tolist(), value)
    assert packed(object()) is None


def test_a_model_of_the_streams_of_two_ranks_is_evaluated_by_one_and_not_trained_on(tmp_path, monkeypatch):
    meta = StreamPositions.meta

    def of_two(self, position):
        return {key: found | {"ranks": found["ranks"] * 2} for key, found in meta(self, position).items()}

    with monkeypatch.context() as two:
        two.setattr(StreamPositions, "meta", of_two)
        trainer(linen.Dense(3)).fit(Batches(), config(max_steps=2, **kept(tmp_path)))
    one = loaded(tmp_path, model=linen.Dense(3))
    assert np.isfinite(one.evaluate(X, Y)[0])
    with pytest.raises(CheckpointError, match="2 ranks .* 1"):
        one.fit(Batches(), config(**kept(tmp_path)))


def test_places_of_ranks_are_their_own_and_not_cut_anew(capsys, one_device):
    meta = {"stream_places": {"at": [0, 3, 36], "shared": False, "ranks": ["a", "b"]}}
    positions = StreamPositions()
    at = Position(3, 0, 36, 3)
    assert positions.restore(meta, at, 1) == at._replace(place="b")
    positions.check_world_size(2, 36)
    with pytest.raises(CheckpointError, match="2 ranks .* 3"):
        positions.check_world_size(3, 36)
    unknown = StreamPositions()
    unknown.restore({"stream_places": meta["stream_places"] | {"ranks": [None, None]}}, at, 1)
    unknown.check_world_size(2, 36)
    assert not capsys.readouterr().err
    unknown.check_world_size(3, 36)
    assert "36 samples" in capsys.readouterr().err
    shared = StreamPositions()
    everywhere = {"stream_places": meta["stream_places"] | {"shared": True}}
    assert shared.restore(everywhere, at, 2).place == "a"
    shared.check_world_size(3, 36)


def test_a_rank_that_used_its_last_sample_before_the_restart_takes_part_with_weight_0(monkeypatch):
    peers = iter([2, 0])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: np.array([mine, next(peers)]))
    end = packed({"number": 5, 7: (b"bytes", np.int64(3))})  # of the 5 batches
    reader = LoaderReader(Batches(), 1, accumulation=1, depth=0, steps_per_epoch=None)
    ((host, _),) = reader.epoch(
        Position(5, 0, 65, 5, place=end)
    )  # "this rank's loader is empty" in its place
    assert (host.inputs.shape, host.weight.tolist(), host.total) == (X[:12].shape, [0] * 12, 2)
    assert (host.stop, host.place) == (67, None)  # the last step: the next pass starts over


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
        seen += [x[: len(it.own)] for x, _ in it]
    assert sorted(np.concatenate(seen).tolist()) == list(range(20))


class Opened:
    """A stream that counts its passes: its position may be that of the newest one."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return zip(X, Y, strict=True)


def test_the_first_sample_is_compared_without_another_pass():
    streams, digests = [Opened(), Opened()], []
    for rank, stream in enumerate(streams):
        batches = RowBatches(Rows(stream), 3, rank, 2)
        next(iter(batches))
        digests.append(batches.first_digest())
    assert ([stream.passes for stream in streams], digests[0]) == ([1, 1], digests[1])


@pytest.mark.parametrize("shared", [True, False])
def test_each_rank_predicts_all_samples_of_a_stream(shared, monkeypatch):
    monkeypatch.setattr(fit_data, "_place", lambda: (1, 2))  # its share has 10 samples
    source = source_of(Rows(range(20), shared=shared))
    assert np.concatenate([*source.blocks(4)]).tolist() == list(range(20))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("samples", [19, 20, 21, 1, 5])
def test_passes_over_a_shared_stream_have_the_steps_of_one_process(samples, accumulation, ranks):
    def read(rank, ranks):
        """Of seven steps: the loader's place, the rows, and the sample at each place of the step."""
        batches = passes(RowBatches(Rows(range(samples)), 6 // ranks, rank, ranks))
        for host in itertools.islice(steps(batches, 1, accumulation), 7):
            has = host.weight == 1
            assert host.total == has.sum()
            yield host.place, len(has), dict(zip(host.places[has], host.inputs[has], strict=True))

    all_ranks = (read(rank, ranks) for rank in range(ranks))
    for (place, _, wanted), *of_ranks in zip(read(0, 1), *all_ranks, strict=True):
        assert [at for at, _, _ in of_ranks] == [place] * ranks
        assert len({rows for _, rows, _ in of_ranks}) == 1  # one program on all ranks
        found = [one for _, _, taken in of_ranks for one in taken.items()]
        assert sorted(found) == sorted(wanted.items())


def test_places_go_from_checkpoint_to_checkpoint_and_not_from_fit_to_fit(tmp_path):
    def stored(folder, step):
        return read_manifest(step_folder(tmp_path / folder, step)).meta.get("stream_places")

    one, other = trainer(linen.Dense(3)), trainer(linen.Dense(3))
    one.fit(Batches(), config(max_steps=3, **kept(tmp_path / "stream")))
    one.fit(X, Y, config(max_steps=3, batch_size=12, **kept(tmp_path / "arrays")))
    assert stored("stream", 3)["at"] == [0, 3, 36]
    assert stored("arrays", 6) is None  # the same position in its epoch
    other.load_checkpoint(str(tmp_path / "stream"))
    other.save_checkpoint(str(tmp_path / "again"))
    assert stored("again", 3) == stored("stream", 3)


def test_a_rollback_reads_on_after_the_bad_step(tmp_path):
    data = Batches()
    data.items[2] = (X[24:36] * np.nan, Y[24:36])
    saving = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_steps": 1}
    history = trainer(linen.Dense(3)).fit(
        data, config(epochs=1, prefetch=0, on_nonfinite="rollback", **saving)
    )
    assert (history.rollback_samples, history.num_steps) == ([36], 4)
    assert data.read == 4 + 2  # one ahead of the bad step; those after it


# ---- the libraries themselves, where they are installed ----------------------------------------------


SOURCE = [(x, np.int32(y)) for x, y in zip(X, Y, strict=True)]


def grain_rows():
    grain = pytest.importorskip("grain", reason="pip install 'cyxjax[grain]'")
    return grain, grain.MapDataset.source(SOURCE).shuffle(seed=1).to_iter_dataset()


def grain_batches():
    return grain_rows()[1].batch(12)


def grain_loader():
    grain = pytest.importorskip("grain.python", reason="pip install 'cyxjax[grain]'")
    sampler = grain.IndexSampler(60, grain.NoSharding(), shuffle=True, num_epochs=1, seed=2)
    return grain.DataLoader(data_source=SOURCE, sampler=sampler, operations=[grain.Batch(12)], worker_count=0)


def grain_workers():
    grain, rows = grain_rows()
    return Rows(rows.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=1)))


def hugging_face():
    datasets = pytest.importorskip("datasets", reason="pip install 'cyxjax[hf]'")
    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    return table.to_iterable_dataset(num_shards=4)


def hugging_face_shuffled():
    return hugging_face().shuffle(seed=3, buffer_size=20)


def hugging_face_mixed():
    from datasets import interleave_datasets

    parts = hugging_face_shuffled(), hugging_face().shuffle(seed=4, buffer_size=20)
    return interleave_datasets(list(parts), stopping_strategy="all_exhausted")


@pytest.mark.parametrize("wrap", [lambda stream: stream, lambda stream: Rows(stream, "x", "label")])
@pytest.mark.parametrize("val_of", [lambda whole: whole.take(12), lambda whole: whole])
def test_hugging_face_streams_of_one_source_have_positions_of_their_own(wrap, val_of):
    whole = hugging_face()
    train, val = (as_rows(wrap(part)).source for part in (whole.skip(12), val_of(whole)))
    list(itertools.islice(train, 5))
    before = train.state_dict()
    assert len(list(val)) >= 12
    assert train.state_dict() == before


def test_a_hugging_face_stream_is_predicted():
    fitted = after_fit(X, Y, config(), model=linen.Dense(3))
    assert np.array_equal(fitted.predict(hugging_face()), fitted.predict(X))


class TorchStream:
    """Like torch's IterableDataset: it has `__getitem__`, which raises."""

    def __getitem__(self, index):
        raise NotImplementedError

    def __iter__(self):
        return zip(X, Y, strict=True)


def test_a_stream_of_torchs_gives_single_samples(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(IterableDataset=TorchStream))
    stream = after_fit(TorchStream(), TorchStream(), config(), model=linen.Dense(3))
    arrays = after_fit(X, Y, X, Y, config(shuffle=False), model=linen.Dense(3))
    assert bits(stream) == bits(arrays)
    assert stream.history.val_losses == pytest.approx(arrays.history.val_losses)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        *((grain_batches, 4), (grain_loader, None), (hugging_face, 4), (hugging_face_shuffled, None)),
        (hugging_face_mixed, 8),
        pytest.param(grain_workers, None, marks=pytest.mark.slow),
    ],
)
def test_streams_of_other_libraries_go_on_where_they_were_cut(tmp_path, make, steps):
    check_goes_on(tmp_path, make, 7, steps_per_epoch=steps, epochs=2, batch_size=12)


def test_an_epoch_that_a_rollback_finds_at_its_end_has_no_more_steps():
    reader = LoaderReader(Batches(), 1, accumulation=1, depth=0, steps_per_epoch=2)
    assert [last for _, last in reader.epoch(Position())] == [False, True]
    assert list(reader.epoch(Position(2, 0, 24, 2))) == []
    assert [host.stop for host, _ in reader.epoch(Position(2, 1, 0, 0))] == [12, 24]
    reader.close()
