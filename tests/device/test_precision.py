"""Training in half precision: scaled losses, steps that all replicas skip, accuracy as in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.core.losses import CrossEntropyLoss, MSELoss
from cyxjax.core.mesh import AXIS
from cyxjax.core.precision import all_finite, parse_policy, skip_nonfinite, with_loss_scale
from cyxjax.errors import ConfigError
from cyxjax.models.gpt import GPT
from cyxjax.sync.registry import STRATEGIES
from tests.support.strategies import (
    EXACT,
    LR,
    MOMENTUM,
    SGD,
    USUAL,
    Alone,
    built,
    mean_of,
    params,
    random_grads,
    whole_grads,
)
from tests.support.trainers import X, Y, after_fit, config, trainer


def with_nan(grads):
    grads["gain"][-1] = np.nan  # of the last replica
    return grads


def scaled(grads, alone):
    """Gradients of the scaled loss, as in the step."""
    scale = np.float32(alone.sync.loss_scale(jax.device_get(alone.state.sync)))
    return jax.tree.map(lambda g: g * scale, grads)


# without those that behave like mean and fp16
@pytest.mark.parametrize(
    ("name", "count"), [*((name, 4) for name in sorted(set(STRATEGIES) - {"bucketed", "bf16"})), ("mean", 1)]
)
def test_a_step_with_a_nan_changes_nothing(name, count):
    sync = skip_nonfinite(built(name, MOMENTUM, USUAL[name]))
    alone = Alone(sync, count).step(*(random_grads(count, t) for t in range(2)))
    before = jax.device_get(alone.state)
    after = jax.device_get(alone.step(with_nan(random_grads(count, 2))).state)
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    jax.tree.map(np.testing.assert_array_equal, before.sync, after.sync)
    assert after.step == 3
    alone.step(random_grads(count, 3))
    assert not np.array_equal(after.params["gain"], jax.device_get(alone.state.params["gain"]))


@pytest.mark.parametrize("name", sorted(set(EXACT) - {"bucketed", "bf16"}))
def test_the_scale_is_divided_out_again(name):
    grads = [whole_grads(2, t) for t in range(3)]
    wrapped, wanted = Alone(with_loss_scale(built(name, SGD, EXACT[name])), 2), params()
    for rows in grads:
        wrapped.step(scaled(rows, wrapped))
        wanted = jax.tree.map(lambda p, g: np.float32(p - LR * g), wanted, mean_of(rows))
    if name == "power_sgd":  # its products round, the others are exact
        wanted = Alone(built(name, SGD, EXACT[name]), 2).step(*grads).copies()[0]
    # powers of two: the same bits
    jax.tree.map(np.testing.assert_array_equal, wanted, wrapped.copies()[0])


def test_the_scale_is_divided_out_of_small_gradients_in_float16():
    # 2^16, the first scale, is not a number of float16: gradients divided by it were 0.
    alone = Alone(with_loss_scale(built("mean", optax.sgd(1.0))), 1, {"w": jnp.zeros(1, jnp.float16)})
    alone.step({"w": jnp.full((1, 1), 2.0**13, jnp.float16)})
    assert float(alone.state.params["w"][0]) == -(2.0**-3)


def test_the_scale_backs_off_grows_and_stays_in_bounds():
    alone = Alone(with_loss_scale(built("mean", SGD), 8.0, growth_interval=3), 2)

    def after(grads):
        state = jax.device_get(alone.step(grads).state.sync)
        return float(state.scale), int(state.good_steps)

    good, bad = random_grads(2, 0), with_nan(random_grads(2, 0))
    assert [after(g) for g in (good, good, bad)] == [(8, 1), (8, 2), (4, 0)]  # counts 3 again
    assert [after(g) for g in (good, good, good)] == [(4, 1), (4, 2), (8, 0)]
    assert min(after(bad)[0] for _ in range(20)) == 2.0**-14


def test_a_policy_in_parts():
    mixed = parse_policy("params=float32,compute=float16,output=float32")
    assert mixed == parse_policy("float16")
    assert (mixed.needs_loss_scale, parse_policy("bfloat16").needs_loss_scale) == (True, False)


class OwnAttention(linen.Module):
    """Calls jax's attention itself."""

    @linen.compact
    def __call__(self, x):
        y = linen.Dense(4)(x)[:, :, None]
        return jax.nn.dot_product_attention(y, y, y)[:, :, 0]


@pytest.mark.usefixtures("as_users_promote")  # Flax's norms widen half precision
@pytest.mark.parametrize("form", ["arrays", "loader"])
def test_float16_that_the_backend_lacks_is_refused_before_anything_is_written(tmp_path, form):
    x = np.ones((16, 3, 4), np.float32)
    data = (x, x) if form == "arrays" else ({"batch": (x, x)}.values(),)  # iterable, without an index
    kept = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every_n_epochs": 1}
    with pytest.raises(ConfigError, match="float16.*CPU.*bfloat16"):
        trainer(OwnAttention(), MSELoss()).fit(*data, config(batch_size=2, precision="float16", **kept))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("as_users_promote", "one_device")
def test_gpt_trains_in_float16():
    tokens = np.random.default_rng(0).integers(0, 16, (32, 8)).astype(np.int32)
    gpt = GPT(vocab_size=16, context_length=8, num_layers=1, num_heads=2, width=16)
    history = trainer(gpt, lr=0.05).fit(tokens, tokens, config(epochs=3, precision="float16"))
    assert history.train_losses[2] < 0.9 * history.train_losses[0]
    assert history.skipped_steps == 0


@pytest.mark.usefixtures("as_users_promote", "two_devices")
@pytest.mark.parametrize("form", [{}, {"gradient_accumulation_steps": 2}, {"reproducibility": "exact"}])
def test_a_short_last_batch_is_trained_on_in_float16_as_in_float32(form):
    """The gradients of its 2 samples are 16 times as large: at the first scale they overflowed."""
    loss = lambda output, target: 2.0 * CrossEntropyLoss()(output, target)  # noqa: E731

    def trained(precision):
        options = config(batch_size=None, global_batch_size=32, precision=precision, **form)
        return after_fit(0.1 * X[:34], Y[:34], options, model=linen.Dense(3), loss=loss)

    half, whole = trained("float16"), trained("float32")
    assert half.history.skipped_steps == 0
    assert half.history.train_losses == pytest.approx(whole.history.train_losses, rel=2e-3)
    jax.tree.map(partial(np.testing.assert_allclose, atol=5e-3), half.params, whole.params)


@pytest.mark.usefixtures("as_users_promote", "one_device")
def test_gradients_of_micro_batches_are_added_in_float32():
    """In bfloat16 the sum of 1,024 equal numbers stays at 256: the step was a quarter of the right one."""
    model = linen.Dense(1, use_bias=False, kernel_init=linen.initializers.ones)
    x, y = np.ones((1024, 4), np.float32), np.zeros((1024, 1), np.float32)
    options = {"epochs": 1, "precision": "params=bfloat16,compute=bfloat16"}
    whole, cut = (
        after_fit(
            x,
            y,
            config(batch_size=1024 // count, gradient_accumulation_steps=count, **options),
            model=model,
            loss=MSELoss(),
        )
        for count in (1, 1024)
    )
    jax.tree.map(np.testing.assert_array_equal, whole.params, cut.params)


@pytest.mark.usefixtures("as_users_promote", "two_devices")
def test_the_loss_of_a_step_whose_gradients_overflow_is_measured(capsys):
    large = lambda output, target: 1000 * MSELoss()(output, target)  # noqa: E731
    options = config(batch_size=30, precision="float16", verbose=True)
    history = trainer(linen.Dense(3), large).fit(X[:60], np.eye(3, dtype=np.float32)[Y[:60]], options)
    assert history.skipped_steps == history.num_steps == 2
    assert history.train_losses == pytest.approx([history.train_losses[0]] * 2)
    assert "2 steps left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "finite"), [(3e38 + 3e38j, True), (complex(1, np.nan), False), (np.inf, False)]
)
def test_both_parts_of_complex_gradients_are_looked_at(other, finite):
    """A gradient with a non-finite imaginary part used to be accepted, and a large finite one refused."""
    grads = jnp.array([[1 + 1j], [other]], jnp.complex64)  # one row per replica
    assert jax.vmap(all_finite, axis_name=AXIS)(grads).tolist() == [finite, finite]
