"""The same weights, data order and optimizer give torch DDP's losses, step by step."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen

from cyxjax import AdamOptimizer, CrossEntropyLoss, SGDOptimizer
from tests.parity import problem
from tests.support.wrapped import wrap

HERE = Path(__file__).parent
STORED = json.loads((HERE / "torch_trajectory.json").read_text())["losses"]
OPTIMIZERS = {"sgd": SGDOptimizer, "momentum": SGDOptimizer, "adam": AdamOptimizer}
# Losses near 1 in float32 (6e-8), summed in a different order, over 50 steps of training.
TOLERANCE = 1e-5


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, images):
        hidden = linen.relu(linen.Dense(24, name="0")(images.reshape(images.shape[0], -1)))
        return linen.Dense(problem.CLASSES, name="2")(hidden)


class Cnn(linen.Module):
    @linen.compact
    def __call__(self, images):
        hidden = linen.Conv(4, (3, 3), padding="VALID", name="0")(images.transpose(0, 2, 3, 1))
        flat = linen.relu(hidden).transpose(0, 3, 1, 2).reshape(images.shape[0], -1)  # channels first
        return linen.Dense(problem.CLASSES, name="3")(flat)


def flax_weights(model):
    """The initial weights in Flax's layout: kernels (in, out) and HWIO."""
    params = {}
    for name, value in problem.first_weights(model).items():
        layer, kind = name.split(".")
        kernel = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
        params.setdefault(layer, {})["bias" if kind == "bias" else "kernel"] = kernel
    return params


def losses(model, optimizer):
    net, criterion, found = {"mlp": Mlp(), "cnn": Cnn()}[model], CrossEntropyLoss(), []
    pair = (lambda key, x: flax_weights(model)), (lambda params, x: net.apply({"params": params}, x))
    ddp = wrap(pair, problem.RANKS)
    rule = OPTIMIZERS[optimizer](**problem.OPTIMIZERS[optimizer])
    for step in range(problem.STEPS):
        parts = [problem.batch(step, rank) for rank in range(problem.RANKS)]
        images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        loss = ddp.loss(criterion, ddp(images), labels.astype(np.int32))
        loss.backward()
        ddp.update_parameters(rule)
        found.append(loss.item())
    return found


@pytest.mark.parametrize("optimizer", problem.OPTIMIZERS)
@pytest.mark.parametrize("model", problem.MODELS)
@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an integer power
def test_losses_are_torch_ddps(model, optimizer):
    found = losses(model, optimizer)
    stored = STORED[f"{model}-{optimizer}"]
    assert stored[0] > stored[-1] * 1.2  # the model has learned
    np.testing.assert_allclose(found, stored, rtol=0, atol=TOLERANCE)


@pytest.mark.multiprocess
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)
def test_the_stored_losses_are_what_torch_gives(tmp_path):
    target = tmp_path / "trajectory.json"
    command = [sys.executable, str(HERE / "make_torch_trajectory.py"), str(target)]
    subprocess.run(command, check=True, timeout=150)
    for name, found in json.loads(target.read_text())["losses"].items():
        np.testing.assert_allclose(found, STORED[name], rtol=0, atol=TOLERANCE)
