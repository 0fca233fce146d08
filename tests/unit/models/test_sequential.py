import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cyxjax.models as models
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError, DataError
from cyxjax.models import (
    BatchNormModule,
    Conv2DModule,
    DropoutModule,
    EmbeddingModule,
    FlattenModule,
    LinearModule,
    MaxPool2DModule,
    ReLUModule,
    ReshapeModule,
    SequentialModel,
    layers,
)

KEY = jax.random.key(0)


def image_model() -> SequentialModel:
    """A model with everything that is saved: kernels, running statistics, dropout, pairs of sizes."""
    model = SequentialModel([ReshapeModule((8, 8, 1)), Conv2DModule(1, 4, (3, 1), padding=(1, 0))])
    model.add(BatchNormModule(4)).add(ReLUModule()).add(MaxPool2DModule(2))
    return model.add(FlattenModule()).add(DropoutModule(0.5)).add(LinearModule(64, 3))


def test_parameters_are_keyed_by_place_and_kind_and_summed_up():
    assert jax.tree.map(np.shape, image_model().parameters()) == {
        "1_conv2d": {"kernel": (3, 1, 1, 4), "bias": (4,)},
        "2_batch_norm": {"scale": (4,), "bias": (4,)},
        "7_linear": {"kernel": (64, 3), "bias": (3,)},
    }
    lines = image_model().summary((64,)).splitlines()
    assert lines[1].split("  ")[0] == "1_conv2d"
    assert "(B, 8, 8, 4)" in lines[1]
    assert lines[1].endswith(" 16")  # 3*1*1*4 + 4
    assert lines[-1].split() == ["total", "219"]  # 16 + 8 + (64*3 + 3)
    assert "(B" not in image_model().summary()
    assert "(B, 5, 2)" in SequentialModel([EmbeddingModule(3, 2)]).summary((5,))


def test_layers_added_later_change_nothing_before_them():
    short = SequentialModel([LinearModule(4, 3)])
    seen = short.parameters()
    long = short.add(LinearModule(3, 2)).parameters()
    np.testing.assert_array_equal(seen["0_linear"]["kernel"], long["0_linear"]["kernel"])
    at_once = SequentialModel([LinearModule(4, 3), LinearModule(3, 2)]).parameters()
    jax.tree.map(np.testing.assert_array_equal, long, at_once)


def test_training_draws_its_own_values_until_the_model_has_some():
    model, x = SequentialModel([LinearModule(4, 3)]), jnp.ones((2, 4))
    of_key, _ = adapt(model).init(jax.random.key(7), x)
    again, _ = adapt(model).init(jax.random.key(8), x)
    assert not np.array_equal(of_key["0_linear"]["kernel"], again["0_linear"]["kernel"])
    seen = model.parameters()
    held, _ = adapt(model).init(jax.random.key(8), x)
    np.testing.assert_array_equal(held["0_linear"]["kernel"], seen["0_linear"]["kernel"])
    jax.tree.map(lambda a: a.delete(), held)  # as a step that donates them does
    np.testing.assert_array_equal(model(x), x @ seen["0_linear"]["kernel"] + seen["0_linear"]["bias"][None])


def test_dropout_keeps_the_mean_and_each_layer_and_call_draws_anew():
    model = SequentialModel([DropoutModule(0.25)])
    x = np.ones((100, 100), np.float32)
    first, second = np.asarray(model(x)), np.asarray(model(x))
    assert set(np.unique(first)) == {0.0, np.float32(1 / 0.75)}
    assert first.mean() == pytest.approx(1.0, abs=0.02)  # three standard errors: 3 * 0.58 / 100
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(model.eval()(x), x)
    fns = adapt(SequentialModel([DropoutModule(0.5), DropoutModule(0.5)]))
    y, _ = fns.apply({}, {}, jnp.ones((100, 100)), KEY, True)
    assert np.mean(np.asarray(y) == 4.0) == pytest.approx(0.25, abs=0.03)  # equal masks would keep one half


def test_batch_norm_uses_the_batch_then_the_running_statistics():
    model = SequentialModel([BatchNormModule(1)])
    x = np.array([[0.0], [2.0], [4.0], [6.0]], np.float32)  # mean 3, biased variance 5
    np.testing.assert_allclose(model(x)[:, 0], (x[:, 0] - 3) / np.sqrt(5 + 1e-5), rtol=1e-6)
    # one step of momentum 0.1 from mean 0, variance 1
    state = model.model_state()["0_batch_norm"]
    np.testing.assert_allclose([state["mean"][0], state["var"][0]], [0.3, 1.4], rtol=1e-6)
    np.testing.assert_allclose(model.eval()(x)[:, 0], (x[:, 0] - 0.3) / np.sqrt(1.4 + 1e-5), rtol=1e-6)
    assert model.model_state()["0_batch_norm"]["mean"] == state["mean"]


def test_embedding_answers_nan_to_ids_it_does_not_have():
    model = SequentialModel([EmbeddingModule(3, 2)])
    table = model.parameters()["0_embedding"]["embedding"]
    out = np.asarray(model(np.array([[2, 0], [3, -1]])))
    np.testing.assert_array_equal(out[0], table[[2, 0]])
    assert np.isnan(out[1]).all()
    assert np.isnan(SequentialModel([EmbeddingModule(256, 2)])(np.int8([-1]))).all()  # int8 cannot hold 256


def test_a_parameter_and_a_state_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(layers, "_kinds", dict(layers._kinds))

    @layers.layer("twice")
    class Twice(layers.Layer):
        def init(self, key):
            return {"scale": np.ones(1)}, {"scale": np.ones(1)}

    with pytest.raises(ConfigError, match="0_twice.*'scale'"):
        SequentialModel([Twice()]).parameters()


def test_gradients_reach_every_parameter_and_half_precision_is_kept():
    fns = adapt(image_model())
    x = jax.random.normal(KEY, (4, 64))
    params, state = fns.init(KEY, x)
    grads = jax.jit(jax.grad(lambda p: (fns.apply(p, state, x, KEY, True)[0] ** 2).sum()))(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    # A batch norm cancels the bias of the convolution before it, up to rounding.
    biased = grads.pop("1_conv2d")
    assert all(np.abs(g).max() > 1e-3 for g in [biased["kernel"], *jax.tree.leaves(grads)])
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    y, new_state = jax.eval_shape(lambda p: fns.apply(p, state, x.astype(jnp.bfloat16), KEY, True), half)
    assert (y.dtype, new_state["2_batch_norm"]["var"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("name", ["0_Linear", "0_linear"])
def test_values_of_other_names_are_refused(name):  # the model would keep its own values
    model = SequentialModel([LinearModule(4, 3)])
    with pytest.raises(ValueError, match="0_Linear|kernel"):
        model.set_values(model.parameters() | {name: {}}, {})


@pytest.mark.parametrize("one", [LinearModule, type("Mine", (LinearModule,), {})(3, 2)])
def test_what_no_file_could_bring_back_is_no_layer(one):
    with pytest.raises(ConfigError, match=r"@cyxjax\.models\.layer"):
        SequentialModel([one])


def test_images_without_channels_are_not_pooled():  # flax would pool the samples
    with pytest.raises(DataError, match="MaxPool2DModule.*ReshapeModule"):
        SequentialModel([MaxPool2DModule(2)])(np.zeros((2, 8, 8), np.float32))


def test_every_public_name_is_there():
    assert all(getattr(models, name) is not None for name in models.__all__)
    assert set(models.__all__) <= set(dir(models))
