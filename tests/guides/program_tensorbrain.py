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
    return {
        "losses": losses,
        "first_batches": first_batches,
        "bias": ddp.parameters()["2_linear"]["bias"].tolist(),
    }


def collectives(rank, world_size):
    """all_reduce, broadcast, all_gather and scatter as statements, which fill arrays as in torch."""
    ones = np.array([1.0, 2.0, 3.0] if rank == 0 else [0.0, 0.0, 0.0], np.float32)
    summed, told, mine = ones.copy(), ones.copy(), np.zeros(1)
    gathered = [np.zeros_like(ones) for _ in range(world_size)]
    dist.barrier()
    dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    dist.broadcast(told, src=0)
    dist.all_gather(gathered, ones)
    dist.scatter(mine, [np.array([1.0 + r]) for r in range(world_size)] if rank == 0 else None, 0)
    filled = {"summed": summed, "told": told, "gathered": np.stack(gathered), "scattered": mine}
    return {name: array.tolist() for name, array in filled.items()}


def main(folder):
    dist.init_process_group(backend="gloo", timeout=60)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = {"place": [rank, world_size, dist.get_local_rank()]}
    values |= train(rank, world_size) | collectives(rank, world_size)
    dist.destroy_process_group()
    report(folder, rank, values)


if __name__ == "__main__":
    main(sys.argv[1])
