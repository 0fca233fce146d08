"""Mixtures keep their shares and tar shards their samples, read by number as any data set."""

import io
import tarfile

import numpy as np
import pytest

from cyxjax.data.sources import Dataset, Mixture, as_dataset
from cyxjax.data.tar_shards import TarShards
from cyxjax.errors import ConfigError, DataError


def numbered(first, count):
    x = np.arange(first, first + count, dtype=np.float32)
    return x[:, None], x.astype(np.int32)


def test_a_mixture_holds_its_shares_everywhere():
    mixed = Mixture([numbered(0, 1000), numbered(1000, 10)], [3, 1], num_samples=4000)
    assert isinstance(mixed, Dataset)
    inputs, targets = mixed.take(np.arange(4000))
    np.testing.assert_array_equal(inputs[:, 0], targets)
    small = targets >= 1000
    assert small.mean() == pytest.approx(0.25, abs=0.001)
    assert small[500:600].sum() == pytest.approx(25, abs=3)
    assert np.bincount(targets[small] - 1000).tolist() == pytest.approx([100] * 10, abs=1)  # each in its turn
    assert np.bincount(targets[~small]).tolist() == pytest.approx([3] * 1000, abs=1)
    order = np.array([7, 3999, 7, 0])
    np.testing.assert_array_equal(mixed.take(order)[1], targets[order])
    assert len(Mixture([numbered(0, 3), numbered(0, 4)], [1, 1])) == 7


def test_a_mixture_that_is_none_is_refused():
    for weights in ([1], [1, 0], [1, -1]):
        with pytest.raises(ConfigError, match=r"weights \[1"):
            Mixture([numbered(0, 3), numbered(0, 3)], weights)


def shard(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def npy(value):
    file = io.BytesIO()
    np.save(file, np.asarray(value))
    return file.getvalue()


@pytest.fixture
def shards(tmp_path):
    for number in range(2):
        members = {}
        for i in range(3):
            at = number * 3 + i
            members |= {f"a/{i:03}.npy": npy(np.full(2, at, np.float32)), f"a/{i:03}.cls": str(at).encode()}
        shard(tmp_path / f"train-{number}.tar", members | {"a/README": b"no sample"})
    return tmp_path


def test_shards_are_one_data_set(shards):
    data = as_dataset(TarShards(shards / "train-*.tar", "npy"), num_workers=2)
    assert len(data) == 6
    inputs, targets = data.take(np.array([5, 0, 3]))
    np.testing.assert_array_equal(inputs, [[5, 5], [0, 0], [3, 3]])
    assert targets.tolist() == [5, 0, 3]
    own = TarShards(
        [shards / "train-0.tar"], ["npy"], None, decode={"npy": lambda data: np.float32(len(data))}
    )
    assert own[0].keys() == {"npy"}


def test_what_is_no_shard_is_refused(shards):
    with pytest.raises(DataError, match=r"val-\*\.tar"):
        TarShards(str(shards / "val-*.tar"))
    with pytest.raises(DataError, match=r"train-0\.tar: .*'a/000' .*'jpg'"):
        TarShards(shards / "train-0.tar")
    shard(shards / "odd.tar", {"1.npy": b"junk", "1.cls": b"x"})
    with pytest.raises(DataError, match=r"'npy' of .*odd\.tar"):
        TarShards(shards / "odd.tar", "npy")[0]
    with tarfile.open(shards / "z.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"unpack \.tar\.gz"):
        TarShards(shards / "z.tar.gz")


def test_a_shard_that_was_cut_since_it_was_opened_is_refused(shards):
    shard(shards / "a.tar", {"1.bin": b"0123456789", "1.cls": b"1"})
    opened = TarShards(shards / "a.tar", "bin", decode={"bin": bytes})
    place = opened._samples[0]["bin"]
    with (shards / "a.tar").open("r+b") as file:
        file.truncate(place.offset + 5)
    with pytest.raises(DataError, match=r"'bin' of .*a\.tar"):
        opened[0]
