"""One process of peers.py for torch: DDP over gloo, gathered batches; on a GPU NCCL, compiled."""

import contextlib
import os
import time
from functools import partial
from itertools import pairwise

import numpy as np
import peers_work as sizes
import torch
import torch.distributed as dist
from peers_work import WORKS, data, say, steps_of, task
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, size: sizes.Text):
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

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
    if work in sizes.TEXTS:
        return GPT(sizes.TEXTS[work])
    if work == "resnet50":
        from torchvision.models import resnet50

        return resnet50(num_classes=sizes.CLASSES)
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
    rank, batch, gpu = int(os.environ.get("RANK", 0)), WORKS[args.work].batch, args.device == "gpu"
    net, place, autocast = model(args.work), lambda rows: rows, contextlib.nullcontext
    if gpu:
        torch.set_float32_matmul_precision("high")  # TF32, as JAX on GPUs
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        net = net.cuda().to(memory_format=torch.channels_last)
        place = lambda rows: rows.pin_memory().cuda(non_blocking=True)  # noqa: E731
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.replicas))
    if WORKS[args.work].dtype == "bfloat16":
        autocast = partial(torch.autocast, "cuda" if gpu else "cpu", torch.bfloat16)
    if args.replicas > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
        net = nn.parallel.DistributedDataParallel(net)
    x, y = data(args.work)
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    if args.work in sizes.IMAGES:  # channels first; on a GPU only as a view
        x = x.permute(0, 3, 1, 2) if gpu else x.permute(0, 3, 1, 2).contiguous()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=gpu)

    def loss_of(inputs, targets):
        with autocast():
            return cross_entropy(net(inputs).flatten(0, -2), targets.flatten())

    loss_of = torch.compile(loss_of) if gpu else loss_of

    def run(steps: int) -> float:
        start, per_epoch = time.perf_counter(), len(x) // (batch * args.replicas)
        for i in range(steps):
            if i % per_epoch == 0:
                order = torch.from_numpy(np.random.default_rng(i).permutation(len(x)))
            at = (i % per_epoch * args.replicas + rank) * batch
            rows = order[at : at + batch]
            optimizer.zero_grad()
            loss = loss_of(place(x[rows]), place(y[rows]))
            loss.backward()
            optimizer.step()
        loss.item()  # waits for the GPU
        return time.perf_counter() - start

    run(3)  # DDP rebuilds its buckets; on a GPU the program is compiled
    seconds = run(steps_of(args))
    if rank == 0:
        say(args, seconds)
    if args.replicas > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
