"""Loaders: torch's conventions, the share of this process, threads that end."""

import numpy as np
import pytest

from cyxjax.data.loader import DataLoader
from cyxjax.data.sources import as_batches
from cyxjax.distributed.sampler import DistributedSampler, create_dataloaders_distributed
from cyxjax.errors import ConfigError, DataError

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10, dtype=np.int32)


def labels(loader):
    return [targets.tolist() for _, targets in loader]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_in_order_the_last_one_short(prefetch):
    loader = DataLoader((X, Y), batch_size=4, prefetch=prefetch)
    assert labels(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    for inputs, targets in loader:
        assert np.array_equal(inputs[:, 0], targets * 2)
    dropping = DataLoader((X, Y), batch_size=4, drop_last=True, prefetch=prefetch)
    assert (labels(dropping), len(dropping)) == ([[0, 1, 2, 3], [4, 5, 6, 7]], 2)


@pytest.mark.parametrize("alone", [X, list(X)], ids=["array", "list"])
def test_inputs_without_targets_are_yielded_alone_and_are_their_own_targets_in_a_fit(alone):
    assert [batch.tolist() for batch in DataLoader(alone, batch_size=5)] == [X[:5].tolist(), X[5:].tolist()]
    for inputs, targets in as_batches(DataLoader(alone, batch_size=5)):
        assert targets is inputs
    inputs, targets = next(iter(DataLoader((X, X), batch_size=5)))
    assert inputs.tolist() == targets.tolist() == X[:5].tolist()


def test_shuffled_passes_differ_and_can_be_set():
    loader = DataLoader((X, Y), batch_size=5, shuffle=True, seed=3)
    first, second = labels(loader), labels(loader)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(10))
    loader.set_epoch(0)
    assert [labels(loader), labels(loader)] == [first, second]


def test_each_process_gets_its_samplers_share():
    shares = []
    for rank in range(3):
        sampler = DistributedSampler(10, 3, rank, shuffle=False)
        shares += labels(DataLoader((X, Y), batch_size=2, sampler=sampler))
    assert shares == [[0, 3], [6, 9], [1, 4], [7, 0], [2, 5], [8, 1]]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="sampler=.*shuffle=True"):
        DataLoader((X, Y), sampler=DistributedSampler(10, 2, 0), shuffle=True)
    with pytest.raises(DataError, match="sampler .*9 .*10"):
        DataLoader((X, Y), sampler=DistributedSampler(9, 2, 0))
    assert labels(DataLoader((X, Y), batch_size=10, pin_memory=True)) == [list(range(10))]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 12])
def test_loaders_of_all_ranks_together(world):
    train, val = [], []
    for rank in range(world):
        loaders = create_dataloaders_distributed((X, Y), (X, Y), batch_size=2, num_replicas=world, rank=rank)
        loaders.train_sampler.set_epoch(1)
        train.append(sum(labels(loaders.train), []))
        val += sum(labels(loaders.val), [])
        assert loaders.test is None
    assert sorted(val) == list(range(10))  # each once: no padding is counted
    assert len({len(part) for part in train}) == 1
    assert len(set(sum(train, []))) == len(sum(train, []))
    # drop_last drops short batches too: whole batches of 2 on every rank
    assert len(sum(train, [])) == 10 // world // 2 * 2 * world
