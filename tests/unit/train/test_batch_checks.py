"""Samples, labels and outputs that cannot be trained: an error, and the trainer is unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError, DataError
from tests.support.refusals import refused
from tests.support.trainers import VAL, X, Y, batches, config, mlp, trainer

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize("val", [(VAL[0][:, :3], VAL[1]), batches(X[:8, :3], Y[:8], 8)])
def test_validation_data_of_another_width_is_refused_before_a_step(val):
    with pytest.raises(DataError, match=r"validation .*float32\[1, 3\].* training .*float32\[1, 6\]"):
        trainer().prepare((X, Y) if isinstance(val, tuple) else batches(X, Y, 8), val, config=config())


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (cx.NLLLoss(), Y.astype(np.float32), r"NLLLoss: .*float32\[4, 3\] .*float32\[4\]"),  # cut to int
        (cx.CrossEntropyLoss(), Y[:, None], r"CrossEntropyLoss: .*int32\[4, 1\].*y\[:, 0\]"),
    ],
)
def test_targets_that_a_loss_of_ours_does_not_take(loss, y, message):
    with pytest.raises(DataError, match=message):
        trainer(loss=loss).prepare(X, y, config=config())


def test_ignored_samples_count_nowhere_and_a_mean_of_nothing_is_refused(two_devices):
    ignored = np.full(len(Y), -100, np.int32)
    train = trainer(loss=cx.CrossEntropyLoss(ignore_index=-100))
    with pytest.raises(DataError, match="training .*ignore_index"):
        train.fit(X, ignored, config(epochs=1))
    start = adapt(mlp()).init(jax.random.key(42), X[:1])[0]
    jax.tree.map(np.testing.assert_array_equal, train.params, start)
    with pytest.raises(DataError, match="evaluated .*ignore_index"):
        train.fit(X, Y, X, ignored, config(epochs=1))
    half = np.where(np.arange(len(Y)) < 40, ignored, Y)  # steps with only ignored labels are harmless
    history = train.fit(X, half, config(epochs=1, shuffle=False))
    assert np.isfinite(history.train_losses[0])
    assert train.evaluate(X[30:], half[30:]) == pytest.approx(train.evaluate(X[40:], Y[40:]), rel=1e-5)


def test_fit_refuses_a_run_folder_that_is_a_file_or_holds_other_things(tmp_path):
    (tmp_path / "thesis.tex").touch()
    train = cx.DistributedTrainer(mlp(), "cross_entropy", "sgd")
    for folder in (tmp_path / "thesis.tex", tmp_path):
        with refused("run_dir", match=r"thesis\.tex"):
            train.fit(X, Y, epochs=1, run_dir=str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


class TimeFirst(linen.Module):
    """Returns (time, samples, classes), as some recurrent models do."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x[:, :, None]).swapaxes(0, 1)


@pytest.mark.parametrize("loss", [cx.MSELoss(), lambda o, t: jnp.square(o[-1] - t[:, :3]).mean(-1)])
def test_an_output_whose_samples_are_not_in_dimension_0_is_refused(loss):
    with pytest.raises(DataError, match=r"output .*\(6, 1, 3\) .*dimension 0 .*\(1, \.\.\.\)"):
        trainer(TimeFirst(), loss).fit(X, X, config(epochs=1))


def test_an_output_of_the_wrapper_whose_samples_are_not_in_dimension_0_is_refused():
    wrapped = cx.distributed.DistributedDataParallel(TimeFirst())
    with pytest.raises(DataError, match="dimension 0 "):
        cx.MSELoss()(wrapped(X), X)


class InGroups(linen.Module):
    """Normalises two samples at a time, as ghost batch norm does."""

    @linen.compact
    def __call__(self, x, train=False):
        pairs = x.reshape(-1, 2, *x.shape[1:]) if len(x) > 1 else x[None]
        return linen.BatchNorm(use_running_average=not train, axis=-1)(pairs).reshape(x.shape)


def test_a_norm_that_cannot_tell_padding_takes_full_batches(tmp_path, capfd):
    ghost = cx.DistributedTrainer(InGroups(), "mse", cx.SGDOptimizer(0.1))
    for rows, options in ((8, {}), (9, {"drop_last": True})):
        ghost.fit(X[:rows], X[:rows], config(epochs=1, steps_per_dispatch=1, **options))
    ghost.fit(batches(X[:8], X[:8], 4), config(epochs=1, drop_last=True))
    assert capfd.readouterr().err == ""
    saving = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every_n_epochs": 1}
    with pytest.raises(ConfigError, match="drop_last"):
        ghost.fit(X[:9], X[:9], config(**saving))
    assert not (tmp_path / "kept").exists()
    ghost.fit(batches(X[:8], X[:8], 4), config(epochs=1))  # the size of its last batch is unknown
    assert "drop_last" in capfd.readouterr().err


class OwnLoss(linen.Module):
    """A model with its own loss, whose batch norm couples the samples."""

    @linen.compact
    def __call__(self, x, train: bool = False):
        z = linen.BatchNorm(use_running_average=not train)(linen.Dense(x.shape[-1])(x))
        return {"loss": (linen.Dropout(0.3, deterministic=not train)(z) - x) ** 2}


def test_a_model_s_own_loss_of_several_values_a_sample_trains_on_two_devices(two_devices):
    train = cx.DistributedTrainer(OwnLoss(), None, cx.SGDOptimizer(0.1))
    losses = train.fit(X, Y, config(steps_per_dispatch=1)).train_losses
    assert losses[1] < losses[0]
    assert train.evaluate(X, Y)[0] == pytest.approx(train.predict(X)["loss"].mean(), rel=1e-5)


def test_metrics_of_one_number_of_samples_and_pairs_are_means_over_the_samples(two_devices):
    mine = {
        "mean": lambda o, t: (o.argmax(-1) == t).mean(),
        "hit": lambda o, t: (o.argmax(-1) == t).astype(jnp.float32),
        "ones": lambda o, t: (o[:, 0], (t == 1).astype(jnp.float32)),
    }
    train = trainer(linen.Dense(3), metrics=cx.Metrics(mine))
    data = X[:21], Y[:21]
    found = train.fit(*data, *data, config(epochs=1, steps_per_dispatch=1)).metrics
    outputs = train.predict(X[:21])
    assert found["val_mean"] == pytest.approx(found["val_hit"], rel=1e-6)
    assert found["val_hit"] == pytest.approx([(outputs.argmax(-1) == Y[:21]).mean()], rel=1e-6)
    assert found["val_ones"] == pytest.approx([outputs[Y[:21] == 1, 0].mean()], rel=1e-5)


@pytest.mark.parametrize(
    "metric",
    [lambda o, t: (o[:, 0].sum(), jnp.float32(8)), lambda o, t: o.T],
    ids=["a pair of numbers", "a value per class"],
)
def test_a_metric_that_is_no_mean_over_samples_is_refused(metric, two_devices):
    with pytest.raises((ConfigError, DataError), match="mine"):
        trainer(linen.Dense(3), metrics=cx.Metrics({"mine": metric})).fit(X, Y, config())
