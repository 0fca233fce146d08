"""Sizes and data of the works that every library in peers.py trains; needs only numpy."""

import argparse
import json
from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    batch: int  # samples per replica and step
    steps: int  # per timed turn
    rows: int  # samples in the data
    gflop: float | None = None  # per sample, forward and backward pass; set only for works for GPUs
    dtype: str = "float32"  # what the model computes in; parameters and optimizer are float32


class Text(NamedTuple):
    """The sizes of a GPT and of its data."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int


WORKS = {
    "mlp": Work(64, 4000, 12_800),  # 784-256-10
    "wide_mlp": Work(64, 300, 12_800),  # 784-2048-2048-10
    "cnn": Work(64, 200, 12_800),  # 28x28, convolutions of 32 and 64, dense 256, max pooling
    "digits": Work(32, 1000, 1_437),  # 8x8, the same network: the work of configs/digits.yaml
    "resnet18": Work(32, 20, 1_280),  # 32x32x3, batch normalisation, a 3x3 stem
    "gpt": Work(8, 60, 512),  # 4 layers of 256, 4 heads, context 128, 96 symbols
    # 4.09 G multiply-adds of the forward pass, times 3 (with the backward pass), times 2 operations
    "resnet50": Work(128, 100, 1_280, 24.5, "bfloat16"),  # 224x224x3
    # 6 N T + 12 L D T^2 of N = 123.6 M parameters without positions (Chowdhery et al. 2022, PaLM, appendix B)
    "gpt2": Work(16, 100, 512, 875.6, "bfloat16"),  # GPT-2 small, context 1,024
}
TEXTS = {"gpt": Text(4, 256, 4, 128, 96), "gpt2": Text(12, 768, 12, 1024, 50_304)}
HIDDEN = {"mlp": (256,), "wide_mlp": (2048, 2048)}
IMAGES = {"cnn": (28, 28, 1), "digits": (8, 8, 1), "resnet18": (32, 32, 3), "resnet50": (224, 224, 3)}
FEATURES = (32, 64)
DENSE = {"cnn": 256, "digits": 128}
CLASSES = 10
STAGES = (64, 128, 256, 512)  # channels of ResNet-18, two blocks per stage; stages 2 to 4 halve the image
QUICK_STEPS = 4


def task() -> argparse.Namespace:
    """The arguments that peers.py passes to this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("replicas", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    return parser.parse_args()


def steps_of(args: argparse.Namespace) -> int:
    return QUICK_STEPS if args.quick else WORKS[args.work].steps


def data(work: str) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), channels last; random, because the time does not depend on the values."""
    rng, rows = np.random.default_rng(0), WORKS[work].rows
    if work in TEXTS:
        size = TEXTS[work]
        text = rng.integers(0, size.vocabulary, (rows, size.context + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]
    shape = (rows, *IMAGES.get(work, (784,)))
    return rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, rows).astype(np.int32)


def say(args: argparse.Namespace, seconds: float) -> None:
    """Prints the samples/s of all replicas as a JSON line, which peers.py reads."""
    samples = steps_of(args) * WORKS[args.work].batch * args.replicas
    print(json.dumps({"samples_per_s": samples / seconds}), flush=True)
