"""The Genesis guide's train.py: rank and world size from the environment, a model class, a loop, an end."""

import os
import sys

import numpy as np
from flax import linen as nn

import cyxjax as cx
import cyxjax.distributed as dist
from tests.support.programs import report


class MyModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="linear")(x))
        return nn.Dense(10, name="output")(x)


def main(folder):
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group(backend="gloo", world_size=world_size, rank=rank)
    print(f"Process {rank}/{world_size} started")
    try:
        ddp_model = dist.DistributedDataParallel(
            MyModel(),
            device_ids=[dist.get_local_rank()],
            find_unused_parameters=False,
            gradient_as_bucket_view=True,
        )
        values = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "up": dist.is_initialized()}
        optimizer = cx.AdamOptimizer(0.01)
        values |= train_loop(ddp_model, optimizer, rank) | accumulate(ddp_model, optimizer) | collectives()
    finally:
        dist.destroy_process_group()
    report(folder, rank, values | {"down": not dist.is_initialized()})


def train_loop(model, optimizer, rank):
    """Ten epochs of one batch of random data, other data on each rank."""
    model.train()
    rng, criterion, losses = np.random.default_rng(rank), cx.CrossEntropyLoss(), []
    data = rng.normal(size=(16, 20)).astype(np.float32)
    targets = rng.integers(0, 10, 16)
    for epoch in range(10):
        loss = model.loss(criterion, model(data), targets)
        loss.backward()
        model.update_parameters(optimizer)
        if rank == 0:
            print(f"Epoch {epoch}, Loss: {loss.item():.4f}")
        losses.append(loss.item())
    model.eval()
    dist.barrier()
    return {"losses": losses, "output": list(model(data).shape), "weights": _weights(model)}


def accumulate(model, optimizer, accumulation_steps=4):
    """Mixed precision and one update after four backwards."""
    model.train()
    batch = {"input": np.ones((4, 20), np.float32), "target": np.arange(4)}
    scaler, before = cx.amp.GradScaler(init_scale=256.0), _weights(model)
    for i in range(accumulation_steps):
        with cx.amp.autocast():
            outputs = model(batch["input"])
            loss = model.loss(cx.CrossEntropyLoss(), outputs, batch["target"]) / accumulation_steps
        scaler.scale(loss).backward()
        if (i + 1) % accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
    return {"moved": _weights(model) != before, "after": _weights(model), "scale": scaler.get_scale()}


def collectives():
    """SUM, MAX and MIN of rank + 1, rank 0's random numbers, and everybody's rank."""
    x = np.full(4, dist.get_rank() + 1.0, np.float32)
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
    told = dist.broadcast(np.random.default_rng(dist.get_rank()).normal(size=8).astype(np.float32), src=0)
    rows = dist.all_gather(np.full((4, 8), dist.get_rank(), np.float32))
    return {
        "reduced": [dist.all_reduce(x, op).tolist() for op in ops],
        "told": told.tolist(),
        "rows": [float(row.mean()) for row in rows],
    }


def _weights(model):
    return [float(np.abs(layer["kernel"]).sum()) for layer in model.parameters().values()]


if __name__ == "__main__":
    main(sys.argv[1])
