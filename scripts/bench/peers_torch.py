"""torch, one process of peers.py: DistributedDataParallel over gloo, fed by a gather of shuffled rows."""

import os
import time

import numpy as np
import torch
import torch.distributed as dist
from peers_work import (
    CLASSES,
    CONTEXT,
    DENSE,
    FEATURES,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    WIDTH,
    WORKS,
    data,
    say,
    steps_of,
    task,
)  # fmt: skip
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight
        return self.norm(self.blocks(x)) @ self.token.weight.T


def model(work: str) -> nn.Module:
    if work == "gpt":
        return GPT()
    if work == "cnn":
        layers, before = [], 1
        for features in FEATURES:
            layers += [nn.Conv2d(before, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = features
        layers += [nn.Flatten(), nn.Linear(before * 49, DENSE), nn.ReLU(), nn.Linear(DENSE, CLASSES)]
        return nn.Sequential(*layers)
    sizes = (784, *HIDDEN[work])
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]  # noqa: B905
    return nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES))


def main() -> None:
    args = task()
    rank, batch = int(os.environ.get("RANK", 0)), WORKS[args.work].batch
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.replicas))
    net = model(args.work)
    if args.replicas > 1:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)
    x, y = data(args.work)
    if args.work == "cnn":
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def run(steps: int) -> float:
        start, per_epoch = time.perf_counter(), len(x) // (batch * args.replicas)
        for i in range(steps):
            if i % per_epoch == 0:
                order = torch.from_numpy(np.random.default_rng(i).permutation(len(x)))
            at = (i % per_epoch * args.replicas + rank) * batch
            rows = order[at : at + batch]
            optimizer.zero_grad()
            logits = net(x[rows])
            cross_entropy(logits.flatten(0, -2), y[rows].flatten()).backward()
            optimizer.step()
        return time.perf_counter() - start

    run(3)  # buckets are rebuilt
    seconds = run(steps_of(args))
    if rank == 0:
        say(args, seconds)
    if args.replicas > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
