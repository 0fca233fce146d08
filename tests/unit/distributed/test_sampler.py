"""The distributed sampler: torch's partition, our order, and a state that allows a different world size."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyxjax.distributed.sampler import DistributedBatchIterator, DistributedSampler
from cyxjax.errors import ConfigError, DataError


@given(size=st.integers(1, 200), world=st.integers(1, 12), drop_last=st.booleans())
def test_unshuffled_indices_follow_torchs_rule(size, world, drop_last):
    # torch's construction, with lists.
    per_rank = size // world if drop_last else -(-size // world)
    expected = (list(range(size)) * (per_rank * world // size + 1))[: per_rank * world]
    for rank in range(world):
        sampler = DistributedSampler(size, world, rank, shuffle=False, drop_last=drop_last)
        assert sampler.get_indices().tolist() == expected[rank::world]


@given(size=st.integers(1, 400), world=st.integers(1, 9), epoch=st.integers(0, 5))
def test_shuffled_ranks_are_disjoint_but_for_padding(size, world, epoch):
    everything = []
    for rank in range(world):
        sampler = DistributedSampler(size, world, rank, seed=3)
        sampler.set_epoch(epoch)
        everything += sampler.get_indices().tolist()
    assert len(everything) == sampler.padded_size()
    counts = np.bincount(everything, minlength=size)
    assert counts.min() >= 1
    assert (counts - 1).sum() == sampler.padded_size() - size < world


def test_sizes_are_those_of_a_rank_and_of_all():
    sampler = DistributedSampler(dataset_size=10, num_replicas=4, rank=1)
    assert (sampler.local_size(), sampler.total_size(), sampler.padded_size(), len(sampler)) == (3, 10, 12, 3)
    short = DistributedSampler(10, 4, 1, drop_last=True)
    assert (short.local_size(), short.total_size(), short.padded_size()) == (2, 10, 8)


@pytest.mark.parametrize(
    ("dataset", "size"),
    [([5, 6, 7], 3), (np.zeros((4, 2)), 4), (np.int64(6), 6), ((np.zeros((4, 2)), np.zeros(4)), 4)],
    ids=["list", "array", "size", "pair"],
)
def test_a_dataset_stands_for_its_size(dataset, size):
    assert DistributedSampler(dataset=dataset, num_replicas=1, rank=0).total_size() == size


def test_epochs_differ_and_repeat_and_a_pass_keeps_the_one_it_began_in():
    sampler = DistributedSampler(100, 2, 0, seed=42)
    first, began = list(sampler), iter(sampler)
    sampler.set_epoch(1)
    assert list(began) == first != list(sampler)
    sampler.set_epoch(0)
    assert sampler.get_indices().tolist() == first


def test_what_is_set_holds_from_the_next_pass_on():
    set_later, made = DistributedSampler(8, 1, 0, seed=3), DistributedSampler(8, 1, 0, seed=5)
    assert list(set_later) != list(made)
    set_later.seed = 5
    assert list(set_later) == list(made)
    set_later.shuffle = False
    assert list(set_later) == list(range(8))


def test_ten_billion_samples():
    sampler = DistributedSampler(10**10, 64, 63)
    sampler.set_epoch(5)
    last = sampler.get_indices(sampler.local_size() - 3)
    assert last.shape == (3,)
    batch = DistributedBatchIterator(sampler, 4).next()
    assert len(set(batch)) == 4
    assert max(batch) < 10**10


def test_the_group_gives_rank_and_world_size(monkeypatch):
    from cyxjax.distributed import process_group

    alone = DistributedSampler(5, shuffle=False)
    assert (alone.num_replicas, alone.rank, list(alone)) == (1, 0, [0, 1, 2, 3, 4])
    monkeypatch.setattr(process_group, "is_initialized", lambda: True)
    group = SimpleNamespace(topology=SimpleNamespace(rank=2, world_size=3))
    monkeypatch.setattr(process_group, "current", lambda: group)
    assert list(DistributedSampler(6, shuffle=False)) == [2, 5]


def test_state_goes_on_at_another_world_size():
    sampler = DistributedSampler(100, 2, 0, seed=9)
    sampler.set_epoch(4)
    ranks = [DistributedSampler(100, 5, rank) for rank in range(5)]
    for rank in ranks:
        rank.load_state_dict(sampler.state_dict())
    together = np.stack([rank.get_indices() for rank in ranks], axis=1).reshape(-1)
    assert np.array_equal(together[0::2], sampler.get_indices())  # the same order, a different partition
    with pytest.raises(DataError, match="100 samples .*99"):
        DistributedSampler(99, 2, 0).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world):
    with pytest.raises(ConfigError, match=f"rank={rank} .*num_replicas={world}"):
        DistributedSampler(8, world, rank)


def test_batches_as_the_guide_reads_them():
    batches = DistributedBatchIterator(DistributedSampler(10, 2, 0, shuffle=False), batch_size=2)
    read = []
    while batches.has_next():
        read.append(batches.next())
    assert read == list(batches) == [[0, 2], [4, 6], [8]]
    assert batches.num_batches() == len(batches) == 3
    with pytest.raises(IndexError):
        batches.next()
    batches.reset(epoch=1)
    assert (batches.sampler.epoch, batches.next()) == (1, [0, 2])
    assert list(DistributedBatchIterator(batches.sampler, 2, drop_last=True)) == [[0, 2], [4, 6]]
