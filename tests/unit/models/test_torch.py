"""Our layers compared with a stored table of torch's outputs, and the table with torch if installed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax import models as m
from tests.unit.models.torch_layers import CASES, TABLE, answers, inputs, wave

STORED = json.loads(TABLE.read_text())
OURS: dict[str, list[m.Layer]] = {
    "linear": [m.LinearModule(5, 3)],
    "linear_without_bias": [m.LinearModule(5, 3, bias=False)],
    "conv2d": [m.Conv2DModule(2, 3, 3)],
    "conv2d_strided": [m.Conv2DModule(2, 3, 3, stride=2, padding=1)],
    "conv2d_oblong": [m.Conv2DModule(1, 2, (3, 2), stride=(2, 1), padding=(1, 0))],
    "conv2d_dilated_groups": [m.Conv2DModule(4, 2, 2, dilation=2, groups=2, bias=False)],
    "max_pool2d": [m.MaxPool2DModule(2)],
    "max_pool2d_padded": [m.MaxPool2DModule(3, stride=2, padding=1)],
    "avg_pool2d": [m.AvgPool2DModule((2, 3))],
    "avg_pool2d_padded": [m.AvgPool2DModule(3, stride=2, padding=1)],
    "global_avg_pool": [m.GlobalAvgPoolModule()],
    "batch_norm_images": [m.BatchNormModule(3)],
    "batch_norm_vectors": [m.BatchNormModule(3, momentum=0.3, epsilon=0.01)],
    "layer_norm": [m.LayerNormModule(6)],
    "group_norm": [m.GroupNormModule(2, 6)],
    "embedding": [m.EmbeddingModule(7, 3)],
    "relu": [m.ReLUModule()],
    "leaky_relu": [m.LeakyReLUModule(0.2)],
    "elu": [m.ELUModule(0.7)],
    "gelu": [m.GELUModule()],
    "gelu_tanh": [m.GELUModule(approximate=True)],
    "silu": [m.SiLUModule()],
    "tanh": [m.TanhModule()],
    "sigmoid": [m.SigmoidModule()],
    "softmax": [m.SoftmaxModule()],
    "log_softmax": [m.LogSoftmaxModule()],
}
# Sums of at most 20 float32 products of size 4, in a different order than in torch.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}


def to_torch(y: np.ndarray) -> np.ndarray:
    return np.moveaxis(y, -1, 1) if y.ndim == 4 else y


def from_torch(x: np.ndarray) -> np.ndarray:
    return np.moveaxis(x, 1, -1) if x.ndim == 4 else x


def with_waves(params: dict) -> dict:
    """The parameters of the torch layer in our layout: kernel or scale is torch's first, bias its second."""

    def filled(name: str, value: jax.Array) -> np.ndarray:
        if name == "kernel" and value.ndim == 2:
            return wave(value.shape[::-1], 0.0).T
        if name == "kernel":
            height, width, channels, features = value.shape
            return wave((features, channels, height, width), 0.0).transpose(2, 3, 1, 0)
        return wave(value.shape, 1.0 if name == "bias" else 0.0)

    return {layer: {n: jnp.asarray(filled(n, v)) for n, v in own.items()} for layer, own in params.items()}


def run(name: str, train: bool) -> tuple[np.ndarray, dict]:
    fns = m.SequentialModel(OURS[name]).to_model_fns()
    params, state = fns.init(jax.random.key(0), None)
    x = jnp.asarray(from_torch(inputs(name)))
    y, new_state = fns.apply(with_waves(params), state, x, jax.random.key(0), train)
    return to_torch(np.asarray(y)), new_state


def test_every_case_has_its_layer():
    assert OURS.keys() == CASES.keys() == STORED.keys() - {"torch"}


@pytest.mark.parametrize("name", CASES)
def test_layer_answers_as_torch_does(name):
    y, _ = run(name, train=False)
    np.testing.assert_allclose(y, STORED[name]["eval"], **TOLERANCE)


@pytest.mark.parametrize(("name", "momentum"), [("batch_norm_images", 0.1), ("batch_norm_vectors", 0.3)])
def test_batch_norm_trains_as_torch_does(name, momentum):
    y, state = run(name, train=True)
    np.testing.assert_allclose(y, STORED[name]["train"], **TOLERANCE)
    (moved,) = state.values()
    np.testing.assert_allclose(moved["mean"], STORED[name]["running_mean"], **TOLERANCE)
    # Torch divides the batch variance by n - 1, we by n; both start at 1 and move by `momentum`.
    n = inputs(name).size // 3
    unbiased = (np.asarray(moved["var"]) - (1 - momentum)) * n / (n - 1) + (1 - momentum)
    np.testing.assert_allclose(unbiased, STORED[name]["running_var"], **TOLERANCE)


def test_the_stored_table_is_torchs():
    pytest.importorskip("torch", reason="pip install torch; the stored table stands for it")
    for name in CASES:
        found = answers(name)
        assert found.keys() == STORED[name].keys()
        for key, value in found.items():
            np.testing.assert_allclose(value, STORED[name][key], **TOLERANCE, err_msg=name)
