"""torch, one process of peers.py: DistributedDataParallel over gloo, fed by a gather of shuffled rows."""

import os
import time
from itertools import pairwise

import numpy as np
import peers_work as sizes
import torch
import torch.distributed as dist
from peers_work import WORKS, data, say, steps_of, task
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(sizes.WIDTH), nn.LayerNorm(sizes.WIDTH)
        self.qkv, self.out = nn.Linear(sizes.WIDTH, 3 * sizes.WIDTH), nn.Linear(sizes.WIDTH, sizes.WIDTH)
        self.up, self.down = nn.Linear(sizes.WIDTH, 4 * sizes.WIDTH), nn.Linear(4 * sizes.WIDTH, sizes.WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, sizes.HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = (
            nn.Embedding(sizes.VOCABULARY, sizes.WIDTH),
            nn.Embedding(sizes.CONTEXT, sizes.WIDTH),
        )
        self.blocks, self.norm = (
            nn.Sequential(*(Block() for _ in range(sizes.LAYERS))),
            nn.LayerNorm(sizes.WIDTH),
        )

    def forward(self, tokens):
        x = self.token(tokens) + self.place.weight
        return self.norm(self.blocks(x)) @ self.token.weight.T


class Residual(nn.Module):
    def __init__(self, before, features, stride):
        super().__init__()
        self.first, self.second = conv(before, features, 3, stride), conv(features, features, 3, 1)
        same = before == features and stride == 1
        self.shortcut = nn.Identity() if same else conv(before, features, 1, stride)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class ResNet18(nn.Sequential):
    def __init__(self):
        layers, before = [conv(3, sizes.STAGES[0], 3, 1), nn.ReLU()], sizes.STAGES[0]
        for features in sizes.STAGES:
            stride = 1 if features == sizes.STAGES[0] else 2
            layers += [Residual(before, features, stride), Residual(features, features, 1)]
            before = features
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, sizes.CLASSES))


def conv(before: int, features: int, size: int, stride: int) -> nn.Module:
    part = nn.Conv2d(before, features, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(part, nn.BatchNorm2d(features))


def model(work: str) -> nn.Module:
    if work == "gpt":
        return GPT()
    if work == "resnet18":
        return ResNet18()
    if work in sizes.DENSE:
        (side, _, before), hidden, layers = sizes.IMAGES[work], sizes.DENSE[work], []
        for features in sizes.FEATURES:
            layers += [nn.Conv2d(before, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before, side = features, side // 2
        layers += [nn.Flatten(), nn.Linear(before * side**2, hidden), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(hidden, sizes.CLASSES))
    widths = (784, *sizes.HIDDEN[work])
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], sizes.CLASSES))


def main() -> None:
    args = task()
    rank, batch = int(os.environ.get("RANK", 0)), WORKS[args.work].batch
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.replicas))
    net = model(args.work)
    if args.replicas > 1:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)
    x, y = data(args.work)
    if args.work in sizes.IMAGES:
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
