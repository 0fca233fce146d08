import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import linen as nn

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.models import (
    BatchNormModule,
    Conv2DModule,
    Layer,
    LinearModule,
    ReLUModule,
    SequentialModel,
    build_model,
    get_model,
    layer,
    load_model,
    registry,
    save_model,
)
from cyxjax.models import layers as layers_file
from cyxjax.train.trainer import DistributedTrainer


@pytest.fixture
def model() -> SequentialModel:
    two = np.int64(2)  # sizes are often those of arrays
    made = SequentialModel([Conv2DModule(1, two, (3, 1)), BatchNormModule(two), ReLUModule()])
    made(np.arange(50, dtype=np.float32).reshape(1, 5, 10, 1))  # moves the running statistics
    return made


def test_a_sequential_model_comes_back_bit_for_bit(model, tmp_path, monkeypatch):
    monkeypatch.setattr(layers_file, "_kinds", dict(layers_file._kinds))

    @layer("doubling")
    class DoublingModule(Layer):
        def call(self, x):
            return x + x

    model.add(DoublingModule())
    path = tmp_path / "new" / "folder" / "m.cyxmodel"
    model.save(path)
    back = SequentialModel.load(path)
    assert back.layers == model.layers
    found, wanted = ((one.parameters(), one.model_state()) for one in (back, model))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    x = np.ones((1, 5, 10, 1), np.float32)
    np.testing.assert_array_equal(model.eval()(x), back.eval()(x))
    del layers_file._kinds["doubling"]  # as in a program that does not import the class
    with pytest.raises(ConfigError, match="'doubling'"):
        SequentialModel.load(path)
    # Other readers can use the numbers.
    arrays = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(arrays["params/0_conv2d/kernel"], model.parameters()["0_conv2d"]["kernel"])
    # A second save replaces the whole file; no temporary file is left.
    (tmp_path / "old").hardlink_to(path)
    old = path.read_bytes()
    SequentialModel([LinearModule(1, 1)]).save(path)
    assert (tmp_path / "old").read_bytes() == old != path.read_bytes()
    assert os.listdir(path.parent) == ["m.cyxmodel"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_dtypes_shapes_and_keys_come_back(tmp_path, dtype):
    value = np.asarray(jnp.arange(6).reshape(3, 2).astype(dtype)).T  # not in C order
    params = {"a": {0: value, "scalar": jnp.asarray(1).astype(dtype)}, "b": jnp.zeros((0, 3), dtype)}
    save_model(tmp_path / "m", {"type": "own"}, params, {})
    saved = load_model(tmp_path / "m")
    assert (saved.architecture, saved.model_state) == ({"type": "own"}, {})
    assert set(saved.params["a"]) == {0, "scalar"}
    assert saved.params["a"]["scalar"].shape == ()
    assert saved.params["b"].shape == (0, 3)
    assert saved.params["a"][0].dtype == value.dtype
    np.testing.assert_array_equal(saved.params["a"][0], value)
    saved.params["a"][0][0, 0] = 1  # an independent array, not a view of the file


def test_a_model_is_rebuilt_from_its_file(tmp_path):
    architecture = get_model("mlp").architecture(hidden=[4, 3], dropout="0.1")
    save_model(tmp_path / "m", architecture, {}, {})
    assert build_model(load_model(tmp_path / "m").architecture) == get_model("mlp")(
        hidden=(4, 3), dropout=0.1
    )
    with pytest.raises(CheckpointError, match="'registry'"):
        SequentialModel.load(tmp_path / "m")
    assert build_model(SequentialModel([LinearModule(2, 3)]).architecture()).layers == (LinearModule(2, 3),)
    with pytest.raises(ConfigError, match="'own' .*'registry' .*'sequential'"):
        build_model({"type": "own"})


def test_a_file_cannot_name_code_that_the_program_has_not_registered(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_builders", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "brought_by_a_file.py").touch()
    name = "brought_by_a_file:Net"
    save_model(tmp_path / "m", {"type": "registry", "name": name, "options": {"features": 3}}, {}, {})
    with pytest.raises(ConfigError, match=name):
        adapt(load_model(tmp_path / "m"))
    assert "brought_by_a_file" not in sys.modules
    registry.register(name)(nn.Dense)
    assert build_model(load_model(tmp_path / "m").architecture) == nn.Dense(3)


@pytest.mark.parametrize("name", ["sequential", "mlp"])
def test_training_starts_from_the_values_of_a_file(name, group, tmp_path):
    x, key = np.ones((8, 4), np.float32), jax.random.key(0)
    fresh = SequentialModel([LinearModule(4, 10), BatchNormModule(10)])
    architecture = fresh.architecture()
    if name == "mlp":
        fresh, architecture = get_model(name)(), get_model(name).architecture()
    fns = adapt(fresh)
    values = fns.init(key, x)
    save_model(tmp_path / "m", architecture, *values)
    loaded = adapt(load_model(tmp_path / "m"))
    jax.tree.map(np.testing.assert_array_equal, loaded.init(jax.random.key(1), x), values)
    for train in (True, False):
        of_file, of_model = (one.apply(*values, x, key, train) for one in (loaded, fns))
        jax.tree.map(np.testing.assert_array_equal, of_file, of_model)
    trainer = DistributedTrainer(load_model(tmp_path / "m"), CrossEntropyLoss(), optax.sgd(0.0))
    config = DistributedTrainingConfig(batch_size=1, epochs=1, checkpoint_every_n_epochs=0, verbose=False)
    trainer.fit(x, np.arange(8), config)
    jax.tree.map(np.testing.assert_array_equal, trainer.params, values[0])


def test_every_damaged_byte_and_every_cut_is_noticed(model, tmp_path):
    path = tmp_path / "m"
    model.save(path)
    whole = path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in (*range(0, len(whole), 7), -1)]
    pickle = b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."
    for data in (*damaged, *(whole[:length] for length in (0, 5, 100, -3)), pickle):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="/m"):
            load_model(path)


def test_a_foreign_a_newer_and_a_missing_file_are_refused(tmp_path, monkeypatch):
    safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "foreign")
    monkeypatch.setattr("cyxjax.models.files.FORMAT", "2")
    save_model(tmp_path / "newer", {}, {}, {})
    monkeypatch.undo()
    for name, message in (("foreign", "None"), ("newer", "2"), ("absent", "")):
        with pytest.raises(CheckpointError, match=f"/{name}.* {message}"):
            load_model(tmp_path / name)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": [np.ones(2)]}, "params/a .*list"),
        ({"a": None}, "params/a .*NoneType"),
        ({"a/b": np.ones(2), "a": {"b": np.ones(2)}}, "params/a/b"),
    ],
)
def test_what_cannot_be_saved_is_said_before_writing(tmp_path, params, message):
    with pytest.raises(CheckpointError, match=message):
        save_model(tmp_path / "m", {}, params, {})
    assert not (tmp_path / "m").exists()
