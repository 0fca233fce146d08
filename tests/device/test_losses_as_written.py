"""A loss of one number: the user's own program on one device, the same number or a refusal on several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError, DataError
from tests.support.trainers import CLASSES, FEATURES, config, trainer, use_devices
from tests.support.trainers import own_group as own_group

ce = optax.softmax_cross_entropy_with_integer_labels
RATE, SAMPLES = 0.1, 44  # the last batch of 8 has 4 samples
rng = np.random.default_rng(0)
X = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
LABELS = rng.integers(0, CLASSES, SAMPLES).astype(np.int32)
REAL = rng.normal(size=(SAMPLES, CLASSES)).astype(np.float32)
BINARY = rng.integers(0, 2, (SAMPLES, CLASSES)).astype(np.float32)
CLASS_WEIGHT = jnp.float32([1, 2, 20])


class Linear(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES, name="out")(x)


class Experts(linen.Module):
    """Logits of two experts, routed, and the loads that a Switch layer balances: over the batch."""

    @linen.compact
    def __call__(self, x):
        share = jax.nn.softmax(linen.Dense(2, name="router")(x))
        chosen = jax.nn.one_hot(share.argmax(-1), 2)
        logits = linen.Dense(2 * CLASSES, name="experts")(x).reshape(-1, 2, CLASSES)
        balance = 2 * (chosen.mean(0) * share.mean(0)).sum()
        return {"logits": (logits * (chosen * share)[..., None]).sum(1), "balance": balance}


def mse(output, target):
    return jnp.square(output - target).mean()


def rmse(output, target):
    return jnp.sqrt(mse(output, target))


def dice(output, target):
    p = jax.nn.sigmoid(output)
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum() + 1)


def pearson(output, target):
    a, b = output - output.mean(), target - target.mean()
    return 1 - (a * b).mean() / (output.std() * target.std() + 1e-6)


def by_class_weight(output, target):
    weight = CLASS_WEIGHT[target]
    return (weight * ce(output, target)).sum() / weight.sum()


def switch(output, target):
    return ce(output["logits"], target).mean() + 0.1 * output["balance"]


MEANS = {"mse": (mse, REAL), "cross entropy": (lambda o, t: ce(o, t).mean(), LABELS)}
COUPLED = {
    "rmse": (Linear, rmse, REAL),
    "dice": (Linear, dice, BINARY),
    "pearson": (Linear, pearson, REAL),
    "class weights": (Linear, by_class_weight, LABELS),
    "switch": (Experts, switch, LABELS),
}


def by_hand(model, loss, x, y, *, size=8, epochs=2):
    """(parameters, losses by epoch) of SGD on each whole batch, as anyone would write it."""
    params = adapt(model).init(jax.random.key(42), x[:1])[0]
    run = jax.jit(jax.value_and_grad(lambda p, x, y: loss(model.apply({"params": p}, x), y)))
    losses = []
    for _ in range(epochs):
        total = 0.0
        for i in range(0, len(x), size):
            some = slice(i, min(i + size, len(x)))
            value, grads = run(params, x[some], jax.tree.map(lambda a, s=some: a[s], y))
            params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
            total += float(value) * len(x[some])
        losses.append(total / len(x))
    return params, losses


def fitted(model, loss, x, y, *, replicas=1, size=8, loader=False, metrics=None, **options):
    use_devices(replicas)
    one = trainer(model, loss, RATE, metrics=metrics)
    accumulation = options.get("gradient_accumulation_steps", 1)
    sizes = {"global_batch_size": size} if not loader else {}
    cfg = config(batch_size=None, shuffle=False, **sizes, **options)
    history = one.fit(Batches(x, y, size // accumulation), cfg) if loader else one.fit(x, y, cfg)
    return one, history


class Batches:
    """A loader: no index, and a short batch at the end."""

    def __init__(self, x, y, size):
        self.x, self.y, self.size = x, y, size

    def __iter__(self):
        for i in range(0, len(self.x), self.size):
            yield jax.tree.map(lambda a, i=i: a[i : i + self.size], (self.x, self.y))


def assert_same(params, other):
    # The same sums in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), params, other)


@pytest.mark.parametrize(
    ("name", "loader"),
    [("rmse", False), ("dice", True), ("class weights", False), ("switch", True)],
    ids=["arrays", "loader, two sums", "arrays, labels", "loader, output of parts"],
)
def test_on_one_device_any_loss_is_the_loop_by_hand(name, loader):
    model, loss, y = COUPLED[name]
    params, losses = by_hand(model(), loss, X, y)
    one, history = fitted(model(), loss, X, y, loader=loader)
    assert_same(one.params, params)
    np.testing.assert_allclose(history.train_losses, losses, rtol=1e-5)


def test_evaluation_on_one_device_uses_the_number_of_each_batch():
    one, history = fitted(Linear(), rmse, X, REAL, metrics=cx.Metrics({"pearson": pearson}))
    measured = one.evaluate_metrics(X, REAL, batch_size=8)
    output = one.predict(X)
    for name, fn in {"loss": rmse, "pearson": pearson}.items():
        each = [
            float(fn(output[i : i + 8], REAL[i : i + 8])) * len(X[i : i + 8]) for i in range(0, SAMPLES, 8)
        ]
        assert measured[name] == pytest.approx(sum(each) / SAMPLES, rel=1e-5)
    assert measured["loss"] != pytest.approx(
        float(rmse(output, REAL)), rel=1e-4
    )  # a mean of batches' numbers


# Any two of loss, replicas and options: strategies with each other are tests/device/test_sync_contract.py's.
@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        ("mse", 1, {}),
        ("cross entropy", 2, {}),
        ("mse", 4, {"gradient_accumulation_steps": 2}),
        ("cross entropy", 4, {"comm": "zero1"}),
        ("mse", 2, {"comm": "fsdp"}),
    ],
)
def test_a_mean_is_the_loop_by_hand_on_any_number_of_devices(name, replicas, options):
    loss, y = MEANS[name]
    one, history = fitted(Linear(), loss, X, y, replicas=replicas, **options)
    params, losses = by_hand(Linear(), loss, X, y)
    assert_same(one.params, params)
    np.testing.assert_allclose(history.train_losses, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        ("rmse", 2, {}),
        ("class weights", 2, {}),
        ("dice", 1, {"gradient_accumulation_steps": 2}),
        ("pearson", 2, {"reproducibility": "exact", "virtual_replicas": 4, "exact_threads": 8}),
        ("class weights", 2, {"comm": "fsdp"}),
    ],
)
def test_where_the_batch_is_split_a_coupled_loss_ends_the_run_unsaved(name, replicas, options, tmp_path):
    model, loss, y = COUPLED[name]
    folder = tmp_path / "checkpoints"
    saving = {"checkpoint_dir": str(folder), "checkpoint_every_n_steps": 1, "checkpoint_every_n_epochs": 1}
    with pytest.raises(ConfigError) as err:
        fitted(model(), loss, X, y, replicas=replicas, **options, **saving)
    assert err.value.key == "loss"
    assert not list(folder.glob("step_*"))


def test_a_number_of_the_batch_that_the_model_returns_needs_the_whole_batch():
    model, loss, y = COUPLED["switch"]
    with pytest.raises(DataError, match="balance"):
        fitted(model(), loss, X, y, replicas=2)


# ---- a mask that is all ones at first: what looks like a mean in the first batches is none later ---------


def masked(output, target):
    return (jnp.square(output[:, 0] - target["y"]) * target["mask"]).sum() / target["mask"].sum()


def tokens(output, target):
    """Of a text whose padding differs: a row alone divides by its own mask."""
    values = jnp.square(output - target["y"]) * target["mask"]
    return values.sum() / target["mask"].sum()


def later_padded():
    """96 texts: the first 32 without padding."""
    mask = np.ones((96, CLASSES), np.float32)
    mask[32:] = rng.random((64, CLASSES)) < 0.5
    mask[32:, 0] = 1
    return rng.normal(size=(96, FEATURES)).astype(np.float32), {
        "y": rng.normal(size=(96, CLASSES)).astype(np.float32),
        "mask": mask,
    }


def rarely_weighted():
    """256 samples, of which rows 200 to 207 weigh more."""
    weight = np.ones(256, np.float32)
    weight[200:208] = [9, 1, 1, 1, 1, 1, 1, 1]
    x = rng.normal(size=(256, FEATURES)).astype(np.float32)
    return x, {"y": rng.normal(size=256).astype(np.float32), "mask": weight}


HIDDEN = {
    "mask of a loader": (tokens, later_padded, True),
    "weights in a few rows": (masked, rarely_weighted, False),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_division_by_the_batchs_own_weights_that_shows_late(name, tmp_path):
    loss, make, loader = HIDDEN[name]
    x, y = make()
    params, losses = by_hand(Linear(), loss, x, y, size=16, epochs=1)
    one, history = fitted(Linear(), loss, x, y, size=16, loader=loader, epochs=1)
    assert_same(one.params, params)
    np.testing.assert_allclose(history.train_losses, losses, rtol=1e-5)

    folder = tmp_path / "checkpoints"
    with pytest.raises(ConfigError) as err:
        fitted(
            *(Linear(), loss, x, y), replicas=2, size=16, loader=loader, epochs=1,
            checkpoint_dir=str(folder), checkpoint_every_n_steps=1,
        )  # fmt: skip
    assert err.value.key == "loss"
    first_odd = 32 // 16 if loader else 200 // 16  # steps before it are the loop by hand, and are saved
    assert max(int(path.name.split("_")[1]) for path in folder.glob("step_*")) == first_odd


@pytest.mark.parametrize("name", HIDDEN)
def test_the_pair_is_the_way_out_on_any_number_of_devices(name):
    loss, make, loader = HIDDEN[name]
    x, y = make()
    params, _ = by_hand(Linear(), loss, x, y, size=16, epochs=1)

    def pair(output, target):
        output = output if target["y"].ndim > 1 else output[:, 0]
        return jnp.square(output - target["y"]), target["mask"]

    one, _ = fitted(Linear(), pair, x, y, replicas=2, size=16, loader=loader, epochs=1)
    assert_same(one.params, params)


def test_padding_hides_no_coupling():
    """Fewer samples than a batch: each step is padded."""
    with pytest.raises(ConfigError):
        fitted(Linear(), rmse, X[:5], REAL[:5], replicas=2)


def test_a_row_without_weight_differs_from_the_batch():
    x, y = later_padded()
    y["mask"][3] = 0  # alone 0 / 0
    with pytest.raises(ConfigError):
        fitted(Linear(), tokens, x, y, replicas=2)


def test_spread_shapes_show_on_several_devices_and_are_the_users_on_one():
    y = REAL[:, :1]

    class Column(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1, name="out")(x)[:, 0]

    def spread(output, target):
        return jnp.square(output[None] - target).mean()

    params, _ = by_hand(Column(), spread, X, y)
    assert_same(fitted(Column(), spread, X, y)[0].params, params)
    with pytest.raises(ConfigError):
        fitted(Column(), spread, X, y, replicas=2)


def test_a_loss_that_takes_no_single_sample_is_refused_before_the_first_step(tmp_path):
    def pairs(output, target):
        a, b = jnp.split(output, 2)
        return jnp.square(a - b).mean()

    params, _ = by_hand(Linear(), pairs, X, REAL)
    assert_same(fitted(Linear(), pairs, X, REAL)[0].params, params)
    with pytest.raises(ConfigError, match="cx.GlobalLoss"):
        fitted(Linear(), pairs, X, REAL, replicas=2, checkpoint_dir=str(tmp_path / "c"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("replicas", [1, 2])
def test_terms_and_metrics_of_one_number_follow_the_same_rule(replicas):
    def task(second):
        return cx.Task({"fit": mse, "small": (second, 0.1)}, metrics={"mse": mse})

    square = lambda o, t: jnp.square(o).mean()  # noqa: E731
    one, history = fitted(Linear(), task(square), X, REAL, replicas=replicas)
    params, losses = by_hand(Linear(), lambda o, t: mse(o, t) + 0.1 * square(o, t), X, REAL)
    assert_same(one.params, params)
    np.testing.assert_allclose(history.train_losses, losses, rtol=1e-5)

    norm = lambda o, t: jnp.linalg.norm(o)  # noqa: E731
    if replicas == 1:
        params, _ = by_hand(Linear(), lambda o, t: mse(o, t) + 0.1 * norm(o, t), X, REAL)
        assert_same(fitted(Linear(), task(norm), X, REAL)[0].params, params)
        return
    with pytest.raises(ConfigError, match="small"):
        fitted(Linear(), task(norm), X, REAL, replicas=replicas)
    with pytest.raises(ConfigError, match="pearson") as err:
        fitted(Linear(), mse, X, REAL, replicas=replicas, metrics=cx.Metrics({"pearson": pearson}))
    assert err.value.key == "metrics"


def test_half_precision_is_no_difference():
    half = lambda o, t: jnp.square(o.astype(jnp.bfloat16) - t.astype(jnp.bfloat16)).mean()  # noqa: E731
    one, _ = fitted(Linear(), half, X, REAL, replicas=2)
    params, _ = by_hand(Linear(), lambda o, t: half(o, t).astype(jnp.float32), X, REAL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.01), one.params, params)


@pytest.mark.parametrize(
    ("loss", "replicas"),
    [
        (lambda o, t: {"loss": mse(o, t)}, 1),
        (lambda o, t: (mse(o, t), {"aux": 1}), 2),
        (lambda o, t: jnp.square(o - t).sum(0), 1),
        (lambda o, t: jnp.square(o - t).sum(0), 2),
        (lambda o, t: mse(o, t) * 1j, 2),
    ],
    ids=["a dict", "loss and aux", "a value per class", "a value per class, split", "complex"],
)
def test_what_is_neither_values_nor_one_number_is_refused_before_training(loss, replicas):
    with pytest.raises(DataError):
        fitted(Linear(), loss, X, REAL, replicas=replicas)


class TimeMajor(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.stack([linen.Dense(CLASSES)(x) for _ in range(5)])


def test_samples_that_are_not_in_dimension_0_are_named():
    with pytest.raises(DataError, match=r"output .*\(5, 1, 3\) .*\(1, \.\.\.\)"):
        fitted(TimeMajor(), lambda o, t: ce(o[-1], t), X, LABELS, replicas=2)
