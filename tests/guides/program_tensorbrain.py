"""The TensorBrain guide's program: torch's words in a loop written by hand, for a launcher."""

import sys

import numpy as np

import cyxjax as cx
import cyxjax.distributed as dist
from cyxjax.distributed import DistributedDataParallel as DDP
from tests.guides.program_cyxwiz import data, model
from tests.support.programs import report


def train(rank, world_size):
    """Sampler, loader and loop, with `set_epoch`; losses are the means over ranks of the last batches."""
    X, y = data()
    ddp = DDP(model(), device_ids=[rank])
    sampler = dist.DistributedSampler(X, num_replicas=world_size, rank=rank, shuffle=True)
    loader = cx.data.DataLoader((X, y), batch_size=5, sampler=sampler)
    criterion, optimizer = cx.CrossEntropyLoss(), cx.AdamOptimizer(0.01)
    losses, first_batches = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch_idx, (inputs, labels) in enumerate(loader):
            if batch_idx == 0:
                first_batches.append(inputs[:, 0].tolist())
            outputs = ddp(inputs)
            loss = ddp.loss(criterion, outputs, labels)
            ddp.zero_grad()
            loss.backward()
            ddp.update_parameters(optimizer)
        losses.append(float(dist.all_reduce(loss.item(), op=dist.ReduceOp.AVG)))
    return {"losses": losses, "first_batches": first_batches, "bias": _bias(ddp)}


def accumulate(rank, world_size):
    """Four micro-batches per update, and the same with `no_sync` around the first three."""
    X, y = data()
    mine = np.arange(rank, 48, world_size).reshape(4, -1)
    found = []
    for quiet in (False, True):
        ddp, criterion, optimizer = DDP(model()), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1)
        for step, rows in enumerate(mine):
            if quiet and step < 3:
                with ddp.no_sync():
                    (ddp.loss(criterion, ddp(X[rows]), y[rows]) / 4).backward()
            else:
                (ddp.loss(criterion, ddp(X[rows]), y[rows]) / 4).backward()
        ddp.update_parameters(optimizer)
        found.append(_bias(ddp))
    return {"accumulated": found[0], "without_sync": found[1]}


def collectives(rank, world_size):
    """all_reduce, all_gather, broadcast and scatter; returned as values, or filled as in torch."""
    ones = np.array([1.0, 2.0, 3.0] if rank == 0 else [0.0, 0.0, 0.0], np.float32)
    dist.barrier()
    summed = dist.all_reduce(ones, op=dist.ReduceOp.SUM)
    gathered = dist.all_gather(ones)
    told = dist.broadcast(ones, src=0)
    scattered = dist.scatter([np.array([1.0 + r]) for r in range(world_size)] if rank == 0 else None, src=0)
    in_place = ones.copy()
    dist.all_reduce(in_place, op=dist.ReduceOp.SUM)
    assert in_place.tolist() == summed.tolist()
    dist.broadcast(in_place := ones.copy(), src=0)
    assert in_place.tolist() == told.tolist()
    tensor_list = [np.zeros_like(ones) for _ in range(world_size)]
    dist.all_gather(tensor_list, ones)
    assert np.array_equal(tensor_list, gathered)
    mine = np.zeros(1)
    dist.scatter(mine, [np.array([1.0 + r]) for r in range(world_size)] if rank == 0 else None, 0)
    assert mine.tolist() == scattered.tolist()
    return {
        "summed": summed.tolist(),
        "gathered": [row.tolist() for row in gathered],
        "told": told.tolist(),
        "scattered": scattered.tolist(),
    }


def _bias(ddp):
    return ddp.parameters()["2_linear"]["bias"].tolist()


def main(folder):
    dist.init_process_group(backend="gloo", timeout=60)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = {"place": [rank, world_size, dist.get_local_rank()]}
    values |= train(rank, world_size) | accumulate(rank, world_size) | collectives(rank, world_size)
    dist.destroy_process_group()
    report(folder, rank, values)


if __name__ == "__main__":
    main(sys.argv[1])
