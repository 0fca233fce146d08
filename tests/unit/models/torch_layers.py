"""Writes a table of the outputs of torch.nn layers: `python tests/unit/models/torch_layers.py` (needs torch).

Weights and inputs are waves, not random numbers, so that torch and this project agree on them without sharing
a generator. Torch's layouts throughout: images (B, C, H, W), kernels (out, in, height, width).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TABLE = Path(__file__).with_name("torch_layers.json")
CASES: dict[
    str, tuple[Callable[[Any], Any], tuple[int, ...]]
] = {  # name -> (module of torch.nn, input shape)
    "linear": (lambda nn: nn.Linear(5, 3), (2, 4, 5)),
    "linear_without_bias": (lambda nn: nn.Linear(5, 3, bias=False), (2, 5)),
    "conv2d": (lambda nn: nn.Conv2d(2, 3, 3), (1, 2, 5, 4)),
    "conv2d_strided": (lambda nn: nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 6, 5)),
    "conv2d_oblong": (lambda nn: nn.Conv2d(1, 2, (3, 2), stride=(2, 1), padding=(1, 0)), (1, 1, 5, 6)),
    "conv2d_dilated_groups": (lambda nn: nn.Conv2d(4, 2, 2, dilation=2, groups=2, bias=False), (1, 4, 5, 5)),
    "max_pool2d": (lambda nn: nn.MaxPool2d(2), (1, 2, 5, 4)),
    "max_pool2d_padded": (lambda nn: nn.MaxPool2d(3, stride=2, padding=1), (1, 2, 5, 6)),
    "avg_pool2d": (lambda nn: nn.AvgPool2d((2, 3)), (1, 2, 4, 7)),
    "avg_pool2d_padded": (lambda nn: nn.AvgPool2d(3, stride=2, padding=1), (1, 2, 5, 6)),
    "global_avg_pool": (lambda nn: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), (2, 3, 4, 5)),
    "batch_norm_images": (lambda nn: nn.BatchNorm2d(3), (2, 3, 4, 2)),
    "batch_norm_vectors": (lambda nn: nn.BatchNorm1d(3, momentum=0.3, eps=0.01), (5, 3)),
    "layer_norm": (lambda nn: nn.LayerNorm(6), (2, 3, 6)),
    "group_norm": (lambda nn: nn.GroupNorm(2, 6), (2, 6, 3, 2)),
    "embedding": (lambda nn: nn.Embedding(7, 3), (2, 4)),
    "relu": (lambda nn: nn.ReLU(), (3, 5)),
    "leaky_relu": (lambda nn: nn.LeakyReLU(0.2), (3, 5)),
    "elu": (lambda nn: nn.ELU(0.7), (3, 5)),
    "gelu": (lambda nn: nn.GELU(), (3, 5)),
    "gelu_tanh": (lambda nn: nn.GELU(approximate="tanh"), (3, 5)),
    "silu": (lambda nn: nn.SiLU(), (3, 5)),
    "tanh": (lambda nn: nn.Tanh(), (3, 5)),
    "sigmoid": (lambda nn: nn.Sigmoid(), (3, 5)),
    "softmax": (lambda nn: nn.Softmax(dim=-1), (3, 5)),
    "log_softmax": (lambda nn: nn.LogSoftmax(dim=-1), (3, 5)),
}


def wave(shape: tuple[int, ...], phase: float) -> np.ndarray:
    """Float32 numbers in [-2, 2] without a pattern: 2 sin(1.7 k + phase), where k counts in C order."""
    values = [2 * math.sin(1.7 * k + phase) for k in range(math.prod(shape))]
    return np.array(values, np.float32).reshape(shape)


def inputs(name: str) -> np.ndarray:
    """The case's input in torch's layout; ids for the embedding."""
    shape = CASES[name][1]
    return np.arange(math.prod(shape)).reshape(shape) % 7 if name == "embedding" else wave(shape, 0.3)


def answers(name: str) -> dict[str, Any]:
    """Torch's output in evaluation and in training, and the final running statistics."""
    import torch
    from torch import nn

    module = CASES[name][0](nn)
    for phase, parameter in enumerate(module.parameters()):
        parameter.data = torch.from_numpy(wave(tuple(parameter.shape), float(phase)))
    x = torch.from_numpy(inputs(name))
    found = {"eval": module.eval()(x)}
    if list(module.buffers()):  # a batch norm: other layers have the same output in training
        found["train"] = module.train()(x)
        found |= {key: value for key, value in module.named_buffers() if value.ndim}
    return {key: _short(value.detach().tolist()) for key, value in found.items()}


def _short(value: Any) -> Any:
    """Nine digits, which is the precision of a float32."""
    return [_short(part) for part in value] if isinstance(value, list) else float(f"{value:.9g}")


if __name__ == "__main__":
    import torch

    rows = [f'  "{name}": {json.dumps(answers(name))}' for name in CASES]
    TABLE.write_text(f'{{\n  "torch": "{torch.__version__}",\n' + ",\n".join(rows) + "\n}\n")
