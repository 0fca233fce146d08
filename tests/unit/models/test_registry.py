import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from cyxjax.config.sections import ModelConfig
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError
from cyxjax.models import registry
from cyxjax.models.layers import count_params
from cyxjax.models.networks import MLP
from cyxjax.models.registry import Config, get_model, model_names, register
from cyxjax.models.saved import build_model
from cyxjax.train.start.named import model_of
from tests.support.refusals import refused


@pytest.fixture
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))


def test_keywords_mapping_and_config_build_the_same_module():
    options = {"hidden": [32, 16], "dropout": "1e-1"}  # YAML reads 1e-1 as a string
    expected = MLP(hidden=(32, 16), dropout=0.1)
    build = get_model("mlp")
    assert build(**options) == build(options) == build(Config(options)) == expected
    assert build({"model": {"name": "mlp", **options}, "epochs": 3}) == expected
    assert build({"model": {"name": "mlp", "options": options}, "epochs": 3}) == expected
    assert build(options, dropout=0.5) == MLP(hidden=(32, 16), dropout=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hiden": 3}, "'mlp' .*'hiden'.* 'hidden'"),
        ({"num_classes": 2.5}, r"'num_classes' .*'mlp' .*2\.5.*integer"),
        ({"hidden": [8, 0]}, r"'hidden' .*'mlp' .*\[8, 0\].*\[1\]: "),
        ({"dropout": 1.0}, r"'dropout' .*'mlp' .*1\.0"),
        ({"activation": "rely"}, "'activation' .*'mlp' .*'rely'.*'relu', 'gelu'"),
        ({"parent": None}, "'mlp' .*'parent'"),
        ({"name": "cnn"}, "'cnn'.* 'mlp'"),
    ],
)
def test_bad_options_name_option_value_and_expectation(options, message):
    with pytest.raises(ConfigError, match=message):
        get_model("mlp")(options)


def test_what_is_registered_is_built_with_checked_options_and_shipped_names_stay(own_names):
    @register("probe")
    class Probe(nn.Module):
        inner: nn.Module  # cannot be written in a file: passed unchanged
        size: int
        activation: Callable[[jax.Array], jax.Array] = nn.relu
        dtype: Any = None

        def __call__(self, x):
            return self.activation(self.inner(x))

    inner = nn.Dense(3)
    model = get_model("probe")(inner=inner, size="7", activation=nn.tanh, dtype=jnp.float32)
    assert (model.inner, model.size, model.activation, model.dtype) == (inner, 7, nn.tanh, jnp.float32)
    assert {"probe", "mlp", "cnn", "resnet18", "resnet50", "vae", "gpt"} <= set(model_names())
    with refused("options.size"):
        get_model("probe")(inner=inner)
    with pytest.raises(ConfigError, match="'activation' .*'probe' .*3"):
        get_model("probe")(inner=inner, size=7, activation=3)
    with pytest.raises(ConfigError, match="model .*'mlp'"):
        register("mlp")(nn.Dense)
    register("probe")(nn.Dense)  # a notebook cell run again
    assert get_model("probe")(features=2) == nn.Dense(2)


def test_the_options_of_a_model_may_be_called_as_the_keys_of_a_file(own_names):
    register("words")(lambda name, type, model, options, config: (name, type, model, options, config))
    given = {"name": "n", "type": "a", "model": {"b": 1}, "options": {"c": 2}, "config": 3}
    section = ModelConfig(name="words", options=given)
    info = DatasetInfo("", "regression", 1, (2,))
    saved = get_model("words").architecture(**given)
    assert model_of(section, info, 0) == build_model(saved) == tuple(given.values())


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 8, 8, 3), (2, 1, 5, 1)])
def test_cnn_takes_images_with_and_without_channels(shape):
    model, x = get_model("cnn")(features=[4, 8, 8, 8], hidden=5, num_classes=3), jnp.ones(shape)
    assert jax.jit(model.init_with_output)(jax.random.key(0), x)[0].shape == (2, 3)


def test_mlp_parameter_count_and_dropout_only_in_training():
    model, x = get_model("mlp")(hidden=[16], num_classes=3, dropout=0.5), jnp.ones((4, 2, 2))
    quiet, variables = model.init_with_output(jax.random.key(0), x)
    assert count_params(variables["params"]) == (4 * 16 + 16) + (16 * 3 + 3)
    dropped = model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(1)})
    assert np.all(np.asarray(quiet) == np.asarray(quiet)[0])  # equal samples, equal logits
    assert not np.array_equal(quiet, dropped)


def test_settings_are_reached_by_dots_and_brackets_and_a_missing_one_names_file_and_nearest(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("model:\n  latent_size: 8\n  layers: [{size: 3}]\nlr: 1e-1\n")
    config = Config.from_file(path)
    assert config.model.latent_size == config["model"]["latent_size"] == 8
    assert config.model.layers[0].size == 3
    assert (config.get("lr"), config.get("absent", 7), "lr" in config, len(config)) == (0.1, 7, True, 2)
    plain = config.to_dict()
    assert plain == {"model": {"latent_size": 8, "layers": [{"size": 3}]}, "lr": 0.1}
    assert type(plain["model"]) is type(plain["model"]["layers"][0]) is dict
    again = pickle.loads(pickle.dumps(config))
    assert copy.deepcopy(config) == config == again == plain
    assert again.model.latent_size == 8
    with pytest.raises(ConfigError, match=r"'latent' .*x\.yaml: model.* 'latent_size'"):
        _ = again.model.latent
    with pytest.raises(KeyError, match="No setting 'modle'"):
        _ = config["modle"]
    assert not hasattr(config, "modle")  # needs an AttributeError
    with pytest.raises(ConfigError, match=r"from .*x\.yaml: model"):
        get_model("mlp")(config)
    plain["model"]["layers"].append(2)
    assert len(config.model.layers) == 1


@pytest.mark.parametrize("text", ["a: [1\nb: 2\n", "- 1\n- 2\n", "a: !!python/object/apply:os.getcwd []\n"])
def test_a_file_of_no_settings_is_named_and_runs_no_code(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.touch()
    assert Config.from_file(path).to_dict() == {}
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml: "):
        Config.from_file(path)
