import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from cyxjax.errors import ConfigError
from cyxjax.models import registry
from cyxjax.models.config import Config
from cyxjax.models.layers import count_params
from cyxjax.models.networks import MLP
from cyxjax.models.registry import get_model, model_names, register


@pytest.fixture
def own_names(monkeypatch):
    monkeypatch.setattr(registry, "_builders", dict(registry._builders))


def test_shipped_names():
    assert {"mlp", "cnn", "resnet18", "resnet50", "vae", "gpt"} <= set(model_names())


def test_keywords_mapping_and_config_build_the_same_module():
    options = {"hidden": [32, 16], "dropout": "1e-1"}  # YAML reads 1e-1 as a string
    expected = MLP(hidden=(32, 16), dropout=0.1)
    build = get_model("mlp")
    assert build(**options) == build(options) == build(Config(options)) == expected
    assert build({"model": {"name": "mlp", **options}, "epochs": 3}) == expected
    assert build({"model": {"name": "mlp", "options": options}, "epochs": 3}) == expected
    assert build(options, dropout=0.5) == MLP(hidden=(32, 16), dropout=0.5)


def test_unknown_name_offers_the_nearest():
    with pytest.raises(ConfigError, match="'resnet19'.* 'resnet18'"):
        get_model("resnet19")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hiden": 3}, "'mlp' .*'hiden'.* 3"),
        ({"num_classes": 0}, "'num_classes' .*'mlp' .*0"),
        ({"num_classes": 2.5}, r"'num_classes' .*'mlp' .*2\.5.*integer"),
        ({"hidden": [8, 0]}, r"'hidden' .*'mlp' .*\[8, 0\].*\[1\]: "),
        ({"dropout": 1.0}, r"'dropout' .*'mlp' .*1\.0"),
        ({"activation": "rely"}, "'activation' .*'mlp' .*'rely'.*'relu', 'gelu'"),
        ({"parent": None}, "'mlp' .*'parent'"),
        ({"name": "cnn"}, "'cnn'.* 'mlp'"),
    ],
)
def test_bad_options_name_option_value_and_expectation(options, message):
    with pytest.raises(ConfigError, match=f"{message}.*HINT: "):
        get_model("mlp")(options)


def test_message_names_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  name: mlp\n  hiden: [3]\n")
    with pytest.raises(ConfigError, match=r"from .*run\.yaml: model"):
        get_model("mlp")(Config.from_file(path))


def test_registered_function_is_built_with_checked_options(own_names):
    @register("probe")
    def probe(size: int, bias: bool = True) -> nn.Module:
        return nn.Dense(size, use_bias=bias)

    assert get_model("probe")(size=3, bias=False) == nn.Dense(3, use_bias=False)
    assert "probe" in model_names()
    with pytest.raises(ConfigError, match="'probe' .*'size'"):
        get_model("probe")()


def test_options_no_file_can_hold_are_passed_as_they_are(own_names):
    @register("wrapper")
    class Wrapper(nn.Module):
        inner: nn.Module
        activation: Callable[[jax.Array], jax.Array] = nn.relu
        dtype: Any = None
        size: int | None = None

        def __call__(self, x):
            return self.activation(self.inner(x))

    inner = nn.Dense(3)
    model = get_model("wrapper")(inner=inner, activation=nn.tanh, dtype=jnp.float32)
    assert (model.inner, model.activation, model.dtype) == (inner, nn.tanh, jnp.float32)
    with pytest.raises(ConfigError, match="'activation' .*'wrapper' .*3"):
        get_model("wrapper")(inner=inner, activation=3)


def test_a_taken_name_is_refused(own_names):
    with pytest.raises(ConfigError, match="model .*'mlp'"):
        register("mlp")(nn.Dense)
    register("mine")(nn.Dense)
    register("mine")(nn.Dense)  # a notebook cell run twice
    with pytest.raises(ConfigError, match="model .*'mine'"):
        register("mine")(nn.Conv)


def test_count_params():
    shapes = jax.eval_shape(lambda: {"a": jnp.zeros((3, 4)), "b": [jnp.zeros(5)]})
    assert count_params(shapes) == 17


def test_naming_a_model_starts_no_jax():
    program = (
        "import sys, cyxjax; cyxjax.Config({}); from cyxjax.models.registry import model_names; model_names()"
    )
    command = [sys.executable, "-c", f"{program}; sys.exit('jax' in sys.modules)"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 8, 8, 3), (2, 1, 5, 1)])
def test_cnn_takes_images_with_and_without_channels(shape):
    model, x = get_model("cnn")(features=[4, 8, 8, 8], hidden=5, num_classes=3), jnp.ones(shape)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert jax.jit(model.apply)(variables, x).shape == (2, 3)


def test_mlp_parameter_count_and_dropout_only_in_training():
    model, x = get_model("mlp")(hidden=[16], num_classes=3, dropout=0.5), jnp.ones((4, 2, 2))
    variables = model.init(jax.random.key(0), x)
    assert count_params(variables["params"]) == (4 * 16 + 16) + (16 * 3 + 3)
    quiet = model.apply(variables, x)
    dropped = model.apply(variables, x, train=True, rngs={"dropout": jax.random.key(1)})
    assert np.all(np.asarray(quiet) == np.asarray(quiet)[0])  # equal samples, equal logits
    assert not np.array_equal(quiet, dropped)
