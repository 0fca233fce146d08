from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core import jaxprs_in_params

from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError, DataError
from cyxjax.models import BatchNormModule, Conv2DModule
from cyxjax.models.gpt import Attention
from cyxjax.models.layers import count_params
from cyxjax.models.networks import negative_elbo
from cyxjax.models.registry import get_model
from cyxjax.models.resnet import BasicBlock, Bottleneck, ResNet

KEY = jax.random.key(0)


def random_values(init, *args):
    """Values for all leaves of `init(KEY, *args)`: to compile its own draws takes longer than to use them."""
    # Also for norms: with 1 and 0 a norm in the wrong position would not be noticed.
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(init, KEY, *args)
    return jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) / 3).astype(np.float32), shapes)


# torchvision publishes 11,689,512 and 25,557,032 for its resnet18 and resnet50. GPT-2 small:
# V*D + T*D + 12 * (4 D^2 attention + 8 D^2 feed-forward + 13 D biases and norms) + 2 D,
# V = 50257, T = 1024, D = 768.
@pytest.mark.parametrize(
    ("name", "options", "shape", "expected"),
    [
        ("resnet18", {}, (1, 224, 224, 3), 11_689_512),
        ("resnet50", {}, (1, 224, 224, 3), 25_557_032),
        ("gpt", {}, (1, 2), 124_439_808),
        ("gpt", {"tie_weights": False}, (1, 2), 124_439_808 + 50257 * 768),
    ],
)
def test_a_model_has_the_published_number_of_parameters(name, options, shape, expected):
    inputs = jax.ShapeDtypeStruct(shape, jnp.int32 if name == "gpt" else jnp.float32)
    shapes = jax.eval_shape(get_model(name)(**options).init, jax.random.key(0), inputs)
    assert count_params(shapes["params"]) == expected


def test_resnet_stem_halves_twice_and_the_small_one_not_at_all():
    def stem_sides(**options):
        model, x = get_model("resnet18")(width=4, **options), jnp.zeros((1, 64, 64, 3))

        def run(key):
            return model.init(key, x, capture_intermediates=True, mutable=True)["intermediates"]

        blocks = jax.eval_shape(run, jax.random.key(0))
        return [blocks[f"BasicBlock_{i}"]["__call__"][0].shape[1] for i in (0, 2, 4, 6)]

    assert stem_sides() == [16, 8, 4, 2]
    assert stem_sides(small_images=True) == [64, 32, 16, 8]


def test_blocks_are_the_layers_their_paper_draws():
    # Composed of layers that are compared with torch (test_torch.py).
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 3)).astype(np.float32)
    for block, kernels in ((BasicBlock, [(3, 2), (3, 1)]), (Bottleneck, [(1, 1), (3, 2), (1, 1)])):
        module = block(features=4, stride=2, zero_init=False)
        variables = random_values(partial(module.init, train=False), x)
        variables["batch_stats"] = jax.tree.map(
            lambda leaf: abs(leaf) + np.float32(0.5), variables["batch_stats"]
        )

        def chain(variables, x, kernels=kernels):
            y = x
            for place, (size, stride) in enumerate(kernels):
                y = conv_norm(variables, y, size, stride, f"Conv_{place}", f"BatchNorm_{place}")
                y = y if place == len(kernels) - 1 else jnp.maximum(y, 0)
            return jnp.maximum(y + conv_norm(variables, x, 1, 2, "shortcut", "shortcut_norm"), 0)

        run = jax.jit(partial(module.apply, train=False))
        found, expected = run(variables, x), jax.jit(chain)(variables, x)
        assert found.shape == (2, 3, 3, 4 * block.expansion)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def conv_norm(variables, y, size, stride, conv, norm):
    params, statistics = variables["params"], variables["batch_stats"]
    features = params[conv]["kernel"].shape[-1]
    layer = Conv2DModule(y.shape[-1], features, size, stride, size // 2, bias=False)
    y, _ = layer.apply(params[conv], {}, y, KEY, False)
    return BatchNormModule(features).apply(params[norm], statistics[norm], y, KEY, False)[0]


def test_resnet_starts_as_its_shortcuts_trains_its_running_statistics_and_evaluates_with_them():
    x = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(np.float32)
    model = ResNet((1,), BasicBlock, 3, width=2, small_images=True)
    fns = adapt(model)
    norms = jax.jit(lambda: jax.tree.map(lambda a: a if a.ndim == 1 else jnp.zeros(()), fns.init(KEY, x)))()
    params, state = jax.tree.map(lambda a, b: a if a.ndim else b, norms, random_values(fns.init, x))
    # The blocks of stage one have no projection: relu(0 + x) = x because x left a ReLU.
    run = partial(model.apply, capture_intermediates=True, mutable=["intermediates"])
    found = jax.jit(run)({"params": params, **state}, x)[1]["intermediates"]
    before, after = (found[name]["__call__"][0] for name in ("stem_norm", "BasicBlock_0"))
    np.testing.assert_array_equal(after, np.maximum(before, 0))
    apply = jax.jit(fns.apply, static_argnums=4)
    y, new_state = apply(params, state, x, jax.random.key(2), True)
    stem = np.asarray(nn.Conv(2, (3, 3), padding=1, use_bias=False).apply({"params": params["stem"]}, x))
    norm = new_state["batch_stats"]["stem_norm"]
    # new = 0.9 * old + 0.1 * batch, from mean 0 and variance 1; rtol: two orders of a float32 sum of 256
    np.testing.assert_allclose(norm["mean"], 0.1 * stem.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.9 + 0.1 * stem.var((0, 1, 2)), rtol=1e-4)
    evaluated, kept = apply(params, new_state, x, jax.random.key(2), False)
    assert y.shape == evaluated.shape == (4, 3)
    jax.tree.map(np.testing.assert_array_equal, kept, new_state)
    assert not np.allclose(y, evaluated)


def test_vae_loss_is_the_formula():
    rng = np.random.default_rng(0)
    logits, mean, log_var = rng.normal(size=(3, 5)), rng.normal(size=(3, 2)), rng.normal(size=(3, 2))
    x = rng.uniform(size=(3, 5))
    p = 1 / (1 + np.exp(-logits))
    bernoulli = -(x * np.log(p) + (1 - x) * np.log(1 - p)).sum(1)
    kl = 0.5 * (np.exp(log_var) + mean**2 - 1 - log_var).sum(1)
    ours = jax.jit(negative_elbo)(*map(np.float32, (logits, x, mean, log_var, 3)))
    np.testing.assert_allclose(ours, bernoulli + 3.0 * kl, rtol=1e-5)  # float32 against float64


def test_vae_output_its_two_modes_and_its_decoder():
    x = np.random.default_rng(1).uniform(size=(3, 8, 8)).astype(np.float32)
    model = get_model("vae")(latent_size=4, hidden=[16])
    fns = adapt(model)
    params, state = random_values(fns.init, x)
    apply = jax.jit(fns.apply, static_argnums=4)
    (quiet, _), (again, _) = (apply(params, state, x, jax.random.key(k), False) for k in (2, 3))
    (drawn, _), (other, _) = (apply(params, state, x, jax.random.key(k), True) for k in (2, 3))
    assert {name: value.shape for name, value in quiet.items()} == {
        "loss": (3,), "reconstruction": (3, 8, 8), "mean": (3, 4), "log_var": (3, 4)
    }  # fmt: skip
    np.testing.assert_array_equal(quiet["loss"], again["loss"])
    np.testing.assert_array_equal(drawn["mean"], other["mean"])
    assert not np.array_equal(drawn["loss"], other["loss"])
    decode = jax.jit(partial(model.apply, method="decode"), static_argnums=2)
    decoded = decode({"params": params}, quiet["mean"], (8, 8))
    np.testing.assert_allclose(decoded, quiet["reconstruction"], rtol=1e-6)  # compiled apart


TINY = {
    "vocab_size": 17, "context_length": 12, "num_layers": 1, "num_heads": 2, "width": 8, "dropout": 0.1
}  # fmt: skip
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10) % 17


@cache
def tiny_gpt(**options):
    model = get_model("gpt")(TINY | options)
    return model, random_values(model.init, TOKENS)


@cache
def gradient(dtype, remat):
    """(a loss with dropout, its gradient) of a tiny GPT that computes in `dtype`."""
    model, variables = tiny_gpt(remat=remat)

    def loss(v):
        v = jax.tree.map(lambda a: a.astype(dtype), v)
        with jax.numpy_dtype_promotion("standard"):
            return (model.apply(v, TOKENS, True, rngs={"dropout": KEY}) ** 2).sum()

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(variables))


def test_gpt_never_sees_the_future():
    model, variables = tiny_gpt()
    run, others = jax.jit(model.apply), np.where(np.arange(10) == 6, np.int32(3), TOKENS)
    logits, changed = np.asarray(run(variables, TOKENS)), np.asarray(run(variables, others))
    # Bit-equal before the change; different at it and after it (attention carries it on).
    np.testing.assert_array_equal(logits[:, :6], changed[:, :6])
    assert np.all(np.abs(logits - changed)[:, 6:].max(axis=-1) > 1e-4)
    assert (logits.shape, logits.dtype) == ((2, 10, 17), np.float32)


def test_gpt_attention_is_softmax_of_scaled_scores():
    x = np.random.default_rng(1).normal(size=(1, 5, 4)).astype(np.float32)
    layer = Attention(num_heads=2, out_stddev=0.5, use_bias=True)
    # Its own values of 0.02 make nearly uniform attention, which would hide a wrong scale.
    variables = jax.tree.map(lambda a: a * 3, random_values(layer.init, x))
    p = variables["params"]
    qkv = x[0] @ p["qkv"]["kernel"] + p["qkv"]["bias"]
    q, k, v = (part.reshape(5, 2, 2).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
    scores = np.where(np.tril(np.ones((5, 5), bool)), q @ k.transpose(0, 2, 1) / np.sqrt(2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ v
    expected = mixed.transpose(1, 0, 2).reshape(5, 4) @ p["out"]["kernel"] + p["out"]["bias"]
    np.testing.assert_allclose(jax.jit(layer.apply)(variables, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_attention_is_lowered_for_the_platform_that_runs_it(monkeypatch):
    x = np.random.default_rng(1).normal(size=(1, 5, 4)).astype(np.float16)
    layer = Attention(num_heads=2, out_stddev=0.5, use_bias=True)
    variables = jax.tree.map(lambda a: a.astype(x.dtype), random_values(layer.init, x.astype(np.float32)))
    here = jax.jit(layer.apply)(variables, x)
    # As on a GPU's host; jax's own attention asks a CPU for a precision of float16 that it has not.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_array_equal(jax.jit(lambda v, x: layer.apply(v, x))(variables, x), here)
    traced = jax.jit(lambda v, x: layer.apply(v, x)).trace(variables, x)
    cpu, cuda = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda"))
    assert cpu.count("dot_general") == cuda.count("dot_general") == 4  # one way in each, not both
    assert cpu != cuda


def test_every_product_of_the_gpts_gradient_is_of_matrices_as_they_lie():
    # A weight gradient over (B, T, D) sums over two dimensions: XLA on CPU copies its inputs first.
    model, variables = tiny_gpt()
    loss = lambda v: model.apply(v, TOKENS, True, rngs={"dropout": KEY}).sum()  # noqa: E731
    found = list(products(jax.make_jaxpr(jax.grad(loss))(variables).jaxpr))
    assert len(found) == 3 * 7  # qkv, scores, values, out, expand, contract, logits: each and two gradients
    assert {len(summed) for (summed, _), _ in found} == {1}
    assert {heads for _, (heads, _) in found} == {(), (0, 1)}


def products(jaxpr):
    """Dimensions of all matrix products of a traced function: ((contracted), (batch)), left and right."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["dimension_numbers"]
        for inner in jaxprs_in_params(eqn.params):
            yield from products(inner)


def test_gpt_remat_changes_memory_not_numbers():
    grads = [gradient(jnp.float32, remat)[1] for remat in (False, True)]
    # Same parameters and dropout masks; recomputation may be fused differently, hence not bit-equal.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *grads)


def test_gpt_computes_gradients_in_float16():
    # On CPU only attention is widened; everything else is rounded to 2^-11 per product.
    (half, half_grads), (whole, grads) = (gradient(dtype, True) for dtype in (jnp.float16, jnp.float32))
    assert abs(half - whole) < 0.01 * whole
    norm = np.linalg.norm
    gaps = jax.tree.map(lambda a, b: norm(a - b) / norm(b), half_grads, grads)
    assert max(jax.tree.leaves(gaps)) < 0.01


def test_texts_without_places_and_a_network_s_parameters_are_refused():
    with pytest.raises(DataError, match="13 tokens.*context_length=12"):  # their places would be NaN
        get_model("gpt")(TINY).init(jax.random.key(0), jnp.zeros((1, 13), jnp.int32))
    with pytest.raises(ConfigError, match=r"VAE.*AdamOptimizer\(ddp"):  # which holds them
        get_model("vae")().parameters()
