"""The task for both libraries, in numpy only: data, order, initial weights (torch's layout)."""

import numpy as np

STEPS, RANKS, BATCH_SIZE, CLASSES = 50, 2, 8, 4
MODELS = ("mlp", "cnn")
OPTIMIZERS = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9},
    "adam": {"lr": 0.003},
}


def first_weights(model: str) -> dict[str, np.ndarray]:
    """float32 arrays by torch's parameter names in `Sequential(...)`; Linear (out, in), Conv2d OIHW."""
    rng = np.random.default_rng(7)
    shapes = {
        "mlp": {"0.weight": (24, 64), "0.bias": (24,), "2.weight": (CLASSES, 24), "2.bias": (CLASSES,)},
        # 8x8 image -> 4 channels of 6x6 -> flatten, channels first -> classes
        "cnn": {"0.weight": (4, 1, 3, 3), "0.bias": (4,), "3.weight": (CLASSES, 144), "3.bias": (CLASSES,)},
    }[model]
    return {name: (rng.normal(size=s) / np.sqrt(s[-1])).astype(np.float32) for name, s in shapes.items()}


def batch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(images float32 (8, 1, 8, 8), labels int64 (8,)) of one rank in one step: four noisy patterns."""
    patterns = np.random.default_rng(1).normal(size=(CLASSES, 1, 8, 8))
    rng = np.random.default_rng([step, rank])
    labels = rng.integers(0, CLASSES, BATCH_SIZE)
    return (patterns[labels] + rng.normal(size=(BATCH_SIZE, 1, 8, 8))).astype(np.float32), labels
