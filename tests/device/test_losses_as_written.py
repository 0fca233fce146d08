"""A scalar loss: the user's own program on one device; the same number, or an error, on several."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.objective.split_check import SplitCheck
from cyxjax.errors import ConfigError, DataError
from tests.support.by_hand import assert_as_by_hand
from tests.support.models import Dense
from tests.support.refusals import refused
from tests.support.trainers import CLASSES, FEATURES, batches, by_hand, ce, trained

LINEAR = Dense(CLASSES)
SAMPLES = 44  # the last batch of 8 has 4 samples
rng = np.random.default_rng(0)
X = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
LABELS = rng.integers(0, CLASSES, SAMPLES).astype(np.int32)
REAL = rng.normal(size=(SAMPLES, CLASSES)).astype(np.float32)
BINARY = rng.integers(0, 2, (SAMPLES, CLASSES)).astype(np.float32)


class Experts(linen.Module):
    """Routed logits of two experts, and their loads over the batch, which a Switch layer balances."""

    @linen.compact
    def __call__(self, x):
        share = jax.nn.softmax(Dense(2, name="router")(x))
        chosen = jax.nn.one_hot(share.argmax(-1), 2)
        logits = Dense(2 * CLASSES, name="experts")(x).reshape(-1, 2, CLASSES)
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
    weight = jnp.float32([1, 2, 20])[target]
    return (weight * ce(output, target)).sum() / weight.sum()


def switch(output, target):
    return ce(output["logits"], target).mean() + 0.1 * output["balance"]


MEANS = {"mse": (mse, REAL), "cross entropy": (lambda o, t: ce(o, t).mean(), LABELS)}
COUPLED = {
    "rmse": (LINEAR, rmse, REAL),
    "dice": (LINEAR, dice, BINARY),
    "pearson": (LINEAR, pearson, REAL),
    "class weights": (LINEAR, by_class_weight, LABELS),
    "switch": (Experts(), switch, LABELS),
}


def assert_two_epochs(model, loss, x, y, **options):
    """Checks two epochs, and their losses, against the loop by hand."""
    one, losses = assert_as_by_hand(model, loss, x, y, epochs=2, **options)
    np.testing.assert_allclose(one.history.train_losses, losses, rtol=1e-5)
    size = options.get("size", 8)
    assert one.history.effective_batch_size == size
    assert one.history.num_steps == 2 * math.ceil(len(x) / size)


@pytest.mark.parametrize(
    ("name", "loader"),
    [("rmse", False), ("dice", True), ("switch", True)],
    ids=["arrays", "loader, two sums", "loader, labels, output of parts"],
)
def test_on_one_device_any_loss_is_the_loop_by_hand(name, loader):
    model, loss, y = COUPLED[name]
    options = {"data": (batches(X, y, 8),), "global_batch_size": None} if loader else {}
    assert_two_epochs(model, loss, X, y, replicas=1, **options)


def test_evaluation_on_one_device_uses_the_number_of_each_batch():
    one = trained(LINEAR, rmse, X, REAL, replicas=1, metrics=cx.Metrics({"pearson": pearson}))
    measured = one.evaluate_metrics(X, REAL, batch_size=8)
    output = one.predict(X)
    for name, fn in {"loss": rmse, "pearson": pearson}.items():
        each = [
            float(fn(output[i : i + 8], REAL[i : i + 8])) * len(X[i : i + 8]) for i in range(0, SAMPLES, 8)
        ]
        assert measured[name] == pytest.approx(sum(each) / SAMPLES, rel=1e-5)
    assert measured["loss"] != pytest.approx(float(rmse(output, REAL)), rel=1e-4)  # a mean over batches


# Pairs of loss, replicas and options; tests/device/test_sync_contract.py compares the strategies.
@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        ("mse", 4, {"gradient_accumulation_steps": 2}),
        ("cross entropy", 4, {"comm": "zero1"}),
        ("mse", 2, {"comm": "fsdp"}),
    ],
)
def test_a_mean_is_the_loop_by_hand_on_any_number_of_devices(name, replicas, options):
    loss, y = MEANS[name]
    assert_two_epochs(LINEAR, loss, X, y, replicas=replicas, **options)


# Five samples are fewer than a batch: each step is padded, which must hide nothing.
@pytest.mark.parametrize(
    ("name", "samples", "replicas", "options"),
    [
        ("rmse", SAMPLES, 2, {}),
        ("rmse", 5, 2, {}),
        ("dice", SAMPLES, 1, {"gradient_accumulation_steps": 2}),
        ("pearson", SAMPLES, 2, {"reproducibility": "exact", "virtual_replicas": 4, "exact_threads": 8}),
        ("class weights", SAMPLES, 2, {"comm": "fsdp"}),
    ],
)
def test_where_the_batch_is_split_a_coupled_loss_ends_the_run_unsaved(
    name, samples, replicas, options, tmp_path
):
    model, loss, y = COUPLED[name]
    folder = tmp_path / "checkpoints"
    saving = {"checkpoint_dir": str(folder), "checkpoint_every_n_steps": 1, "checkpoint_every_n_epochs": 1}
    with refused("loss"):
        trained(model, loss, X[:samples], y[:samples], replicas=replicas, **options, **saving)
    assert not list(folder.glob("step_*"))


@pytest.mark.parametrize(
    ("rows", "part"), [([0.12, 1.0], "12 %"), ([0.96, 8.0], "12 %"), ([1.0, 0.0], "inf %")]
)
def test_the_error_names_the_difference_as_a_part_of_a_samples_value(rows, part):
    with refused("loss", match=f" {part}"):
        SplitCheck({"the loss": mse}).watch()(np.float32([rows]))


# ---- a mask that is all ones at first: a mean in the first batches is not one later ----------------------


def masked(output, target):
    return (jnp.square(output[:, 0] - target["y"]) * target["mask"]).sum() / target["mask"].sum()


def test_a_division_by_the_batchs_own_weights_that_shows_late(tmp_path):
    x = rng.normal(size=(256, FEATURES)).astype(np.float32)
    y = {"y": rng.normal(size=256).astype(np.float32), "mask": np.ones(256, np.float32)}
    y["mask"][200] = 9
    assert_two_epochs(LINEAR, masked, x, y, size=16, replicas=1)
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every_n_steps": 1}
    with refused("loss"):
        trained(LINEAR, masked, x, y, size=16, **saving)
    # Steps before the first difference equal the hand-written loop, and are saved.
    assert max(int(p.name.split("_")[1]) for p in (tmp_path / "checkpoints").glob("step_*")) == 200 // 16


def test_a_loss_that_takes_no_single_sample_is_refused_before_the_first_step(tmp_path):
    def pairs(output, target):
        a, b = jnp.split(output, 2)
        return jnp.square(a - b).mean()

    assert_two_epochs(LINEAR, pairs, X, REAL, replicas=1)
    with pytest.raises(ConfigError, match="cx.GlobalLoss"):
        trained(LINEAR, pairs, X, REAL, checkpoint_dir=str(tmp_path / "c"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("replicas", [1, 2])
def test_terms_and_metrics_of_one_number_follow_the_same_rule(replicas):
    def task(second):
        return cx.Task({"fit": mse, "small": (second, 0.1)}, metrics={"mse": mse})

    def trains(second):
        written = lambda o, t: mse(o, t) + 0.1 * second(o, t)  # noqa: E731
        assert_two_epochs(LINEAR, task(second), X, REAL, written=written, replicas=replicas)

    trains(lambda o, t: jnp.square(o).mean())
    norm = lambda o, t: jnp.linalg.norm(o)  # noqa: E731
    if replicas == 1:
        trains(norm)
        return
    with pytest.raises(ConfigError, match="small"):
        trained(LINEAR, task(norm), X, REAL, replicas=replicas)
    with refused("metrics", match="pearson"):
        trained(LINEAR, mse, X, REAL, replicas=replicas, metrics=cx.Metrics({"pearson": pearson}))


def test_half_precision_is_no_difference():
    half = lambda o, t: jnp.square(o.astype(jnp.bfloat16) - t.astype(jnp.bfloat16)).mean()  # noqa: E731
    one = trained(LINEAR, half, X, REAL)
    params, _ = by_hand(LINEAR, lambda o, t: half(o, t).astype(jnp.float32), X, REAL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.01), one.params, params)


@pytest.mark.parametrize(
    ("loss", "replicas", "message"),
    [
        (lambda o, t: (mse(o, t), {"aux": 1}), 2, "loss"),
        (lambda o, t: jnp.square(o - t).sum(0), 1, "loss"),
        (cx.GlobalLoss(lambda o, t, w: o), 2, r"\(8, 3\).* \(8,\)|\(4, 3\).* \(4,\)"),
    ],
    ids=["loss and aux", "a value per class", "matrix"],
)
def test_what_is_neither_values_nor_one_number_is_refused_before_training(loss, replicas, message):
    with pytest.raises(DataError, match=message):
        trained(LINEAR, loss, X, REAL, replicas=replicas)
