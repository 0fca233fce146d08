"""A loop as with torch DDP: training, validation over all ranks, a checkpoint after each epoch, and a resume.

python scripts/examples/ddp_loop.py runs/loop.pkl    (with 2 or 4 ranks under the launcher: the same losses)
"""

import os
import pickle
import sys
from pathlib import Path

import numpy as np

import cyxjax as cx
from cyxjax import distributed as dist

BATCH = 64  # samples per step, over all ranks


def train(ddp, criterion, optimizer, loader):
    """Trains for an epoch; returns the mean loss over the samples of all ranks."""
    ddp.train()
    sums = np.zeros(2)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(ddp(images), labels)
        loss.backward()
        optimizer.step()
        sums += loss.item() * len(labels), len(labels)
    total, count = dist.all_reduce(sums)  # the sum over ranks
    return float(total / count)


def accuracy(ddp, images, labels):
    """The accuracy over all samples; each rank takes its share, and no sample is repeated."""
    ddp.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = np.asarray(ddp(images[mine])).argmax(-1) == labels[mine]
    right, count = dist.all_reduce(np.array([right.sum(), right.size]))
    return right / count


def save(path, state):
    """Replaces the file at once: an interrupted save leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_bytes(pickle.dumps(state))
    os.replace(path.with_suffix(".part"), path)


def main(epochs=3, path=None):
    if not dist.is_initialized():
        dist.init_process_group()
    data = cx.load_dataset("digits")
    images, labels = data.train.take(range(1024))
    ddp = dist.DistributedDataParallel(cx.get_model("mlp")())
    criterion, optimizer = cx.CrossEntropyLoss(), cx.AdamOptimizer(ddp, lr=0.003)
    sampler = dist.DistributedSampler(len(images), seed=0)
    loader = cx.DataLoader((images, labels), batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    losses = []
    if path and path.exists():  # all ranks load the same values
        saved = pickle.loads(path.read_bytes())
        ddp.load_state_dict(saved["ddp"])
        losses = saved["losses"]
    for epoch in range(len(losses), epochs):
        sampler.set_epoch(epoch)
        losses.append(train(ddp, criterion, optimizer, loader))
        reached = accuracy(ddp, *data.val.take(range(len(data.val))))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, validation accuracy {reached:.4f}")
            if path:
                save(path, {"ddp": ddp.state_dict(), "losses": losses})
    return losses


if __name__ == "__main__":
    main(path=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
