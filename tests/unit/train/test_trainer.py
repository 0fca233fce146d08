"""DistributedTrainer: the forms of fit, its refusals, and numbers that do not depend on the replicas."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import cyxjax as cx
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import ConfigError, DataError, GroupError
from cyxjax.train.feeding import fit_data
from cyxjax.train.settings import resolve
from cyxjax.train.trainer import DistributedTrainer
from tests.support.refusals import refused
from tests.support.trainers import (
    CLASSES,
    VAL,
    Line,
    X,
    Y,
    config,
    mlp,
    trainer,
    use_devices,
)

pytestmark = pytest.mark.usefixtures("two_devices")

FORMS = {
    "arrays": (X, Y),
    "arrays and validation arrays": (X, Y, *VAL),
    "dataset": (ArrayDataset(X, Y),),
    "datasets": (ArrayDataset(X, Y), ArrayDataset(*VAL)),
    "pairs": ((X, Y), VAL),
    "loader": (cx.data.DataLoader((X, Y), 8, shuffle=True, seed=42),),
    "loaders": (cx.data.DataLoader((X, Y), 8, shuffle=True, seed=42), cx.data.DataLoader(VAL, 5)),
    "loader and arrays": (cx.data.DataLoader((X, Y), 8, shuffle=True, seed=42), VAL),
}


def test_tuples_are_inputs_or_targets_and_two_pairs_are_data_sets():
    pair, shorter = (X, X[:, :2]), X[:50]
    found, _ = fit_data.parse((pair, Y), config())
    assert (len(found.train.inputs), found.val) == (2, None)
    assert found.train.targets is Y
    found, _ = fit_data.parse((X, (Y, X)), config())
    assert (found.train.inputs is X, len(found.train.targets), found.val) == (True, 2, None)
    found, _ = fit_data.parse(((X, Y), VAL), config())
    assert (found.train.inputs is X, found.val.inputs is VAL[0]) == (True, True)
    records = {"a": X, "y": Y}, {"a": VAL[0], "y": VAL[1]}  # "y" names the target
    found, _ = fit_data.parse(records, config())
    assert (found.train.inputs is X, found.val.inputs is VAL[0]) == (True, True)
    found, _ = fit_data.parse(({"a": X, "b": X}, {"a": X, "b": X}), config())
    assert (len(found.train.targets), found.val) == (2, None)
    found, _ = fit_data.parse((pair, Y, pair, Y), config())
    assert len(found.val.inputs) == 2
    with pytest.raises(DataError, match=r"inputs\[0\] .*60.*inputs\[1\] .*50"):
        fit_data.parse(((X, shorter), Y), config())
    for empty in (((X, Y), (X[:0], Y[:0])), (X, Y, X[:0], Y[:0])):
        with pytest.raises(DataError, match="validation.* 0 samples"):
            fit_data.parse(empty, config())


def test_all_forms_of_fit_train_alike():
    # All have the same samples, order (seed 42) and batch (2 replicas x 4), so the losses are the same bits.
    losses = {}
    for form, data in FORMS.items():
        history = trainer().fit(*data, config(epochs=1))
        assert len(history.val_losses) == (0 if form in ("arrays", "dataset", "loader") else 1), form
        assert history.num_steps == 8  # ceil(60 / 8): the last 4 samples are one step
        assert history.effective_batch_size == 8
        assert (history.world_size, history.num_replicas) == (1, 2)
        losses[form] = history.train_losses
    assert all(found == losses["arrays"] for found in losses.values()), losses


def test_a_part_is_held_out_for_validation():
    history = trainer().fit(X, Y, config(validation_split=0.1))
    assert history.num_steps == 2 * 7  # 54 of 60 samples in steps of 8
    assert len(history.val_losses) == len(history.val_accuracies) == 2
    with pytest.raises(DataError, match=r"validation_split=0\.1"):
        trainer().fit(X[:4], Y[:4], config(validation_split=0.1))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ((), ConfigError, "^fit .*0 "),
        ((X, Y, X), ConfigError, "^fit .*3 "),
        ((X[:0], Y[:0]), DataError, "0 samples"),
        ((X, Y[:-1]), DataError, "inputs .*60.* targets .*59"),
        ((X, np.where(Y == 2, 3, Y)), DataError, "sample 0 .*label 3.* 3 outputs"),
        ((X, Y - 1), DataError, "sample 3 .*label -1"),
        ((X, np.zeros((60, 2), np.float32)), DataError, r"float32\[4, 3\] .*float32\[4, 2\]"),
        ((iter([(X, Y)]),), DataError, "list_iterator .*steps_per_epoch"),
        ((cx.data.DataLoader((X, Y), 100, drop_last=True),), DataError, "drop_last"),
    ],
)
def test_bad_data_is_refused_before_training(data, error, says, tmp_path):
    with pytest.raises(error, match=says):
        trainer().fit(*data, config(checkpoint_dir=str(tmp_path / "c"), checkpoint_every_n_epochs=1))
    assert not (tmp_path / "c").exists()


def test_nan_that_appears_while_training_ends_the_run_with_its_step():
    with pytest.raises(cx.errors.CyxjaxError, match=r"loss .*step \d+ \(epoch 1\)"):
        trainer().fit(X * 1e30, Y, config())  # the second output is infinite


def test_no_optimizer_no_parameters_and_no_model_are_said():
    held = nnx.Optimizer(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    for value in (None, cx.AdamOptimizer, 0.1, held):
        with pytest.raises(ConfigError, match=r"cx\.AdamOptimizer\(0\.001\)"):
            DistributedTrainer(mlp(), cx.CrossEntropyLoss(), value)
    for value in (cx.CrossEntropyLoss, 3):
        with pytest.raises(DataError, match=r"^(.*CrossEntropyLoss'>|3) .*cx\.CrossEntropyLoss\(\)"):
            DistributedTrainer(mlp(), value, cx.AdamOptimizer())
    for value in ("mlp", nnx.Linear, object()):
        with refused("model"):
            DistributedTrainer(value, cx.CrossEntropyLoss(), cx.AdamOptimizer())
    for call in (lambda t: t.params, lambda t: t.save_checkpoint("x"), lambda t: t.state):
        with pytest.raises(GroupError, match=r"fit\(\.\.\.\).* load_checkpoint"):
            call(trainer())


@pytest.mark.parametrize("samples", [1, 25])
def test_results_do_not_depend_on_the_number_of_replicas(samples):
    # Steps of 16: some of 4 replicas have padding alone where 1 or, in a second step, 9 samples are left.
    found = []
    for devices in (1, 4):
        use_devices(devices)
        one = trainer(linen.Dense(3))
        history = one.fit(X[:samples], Y[:samples], *VAL, config(batch_size=16 // devices))
        assert history.num_steps == 2 * (1 + samples // 16)
        curves = [*history.train_losses, *history.val_losses, *history.val_accuracies]
        whole = one.evaluate(*VAL)
        found.append(([*curves, *whole], one.predict(X)))
        assert one.evaluate(*VAL, batch_size=3) == pytest.approx(whole, rel=1e-6)
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=2e-5)  # rounding of sums only
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)


def test_learning_rates_are_scaled_and_warmed_up():
    # 2 replicas x 8 = 16 per step, base 4: x4 linear, x2 by the root. 4 steps an epoch.
    scaled = {"batch_size": 8, "base_batch_size": 4, "warmup_steps": 8, "epochs": 3}
    linear = config(**scaled, lr_scaling="linear")
    assert trainer(linen.Dense(3)).fit(X, Y, linear).learning_rates == pytest.approx([0.4 * 4 / 8, 0.4, 0.4])
    assert resolve(config(**scaled, lr_scaling="sqrt"), 2).step.rate.peak == 2


def test_a_regression_has_no_accuracy():
    one = trainer(Line(), cx.MSELoss(), lr=0.01)
    history = one.fit(X, X.sum(1), X, X.sum(1), config(epochs=1))
    loss, accuracy = one.evaluate(X, X.sum(1))
    assert loss == history.val_losses[-1]
    assert all(math.isnan(a) for a in (accuracy, *history.train_accuracies, *history.val_accuracies))
    assert one.predict(X).shape == (60,)


def test_predict_keeps_the_shape_of_what_the_model_returns():
    model = cx.get_model("vae")(latent_size=2, hidden=(4,))
    one = DistributedTrainer(model, None, cx.SGDOptimizer(0.01))
    images = np.random.default_rng(0).uniform(size=(11, 3, 3)).astype(np.float32)
    output = one.predict(images)  # 11 samples on 2 replicas: padded, then the padding is removed
    assert {name: a.shape for name, a in output.items()} == {
        "loss": (11,), "reconstruction": (11, 3, 3), "mean": (11, 2), "log_var": (11, 2)
    }  # fmt: skip
    assert np.mean(output["loss"]) == pytest.approx(one.evaluate(images)[0], rel=1e-5)


def test_an_output_without_numbers_has_a_row_per_sample(two_devices):
    model = ((lambda key, x: {"w": x[0]}), lambda params, x: (x * params["w"][None], x[:, :0]))
    one = DistributedTrainer(model, lambda output, target: output[0].sum(-1), cx.SGDOptimizer(0.01))
    assert [a.shape for a in one.predict(np.ones((5, 2), np.float32))] == [(5, 2), (5, 0)]


def test_a_model_that_returns_no_loss_says_what_is_missing():
    with pytest.raises(DataError, match=r"float32\[4, 3\].*'loss'"):
        DistributedTrainer(mlp(), None, cx.AdamOptimizer()).fit(X, Y, config())


def test_numpy_s_own_dtypes_and_data_on_any_device_are_taken():
    one, wide, away = trainer(), trainer(), jax.device_put(X, jax.devices()[5])
    losses = one.fit(X, Y, config(epochs=1)).train_losses
    assert wide.fit(X.astype(np.float64), Y.astype(np.int64), config(epochs=1)).train_losses == losses
    assert trainer().fit(away, Y, config(epochs=1)).train_losses == losses
    assert one.predict(away[:3]).shape == (3, CLASSES)
    assert one.evaluate(away, Y) == one.evaluate(X, Y)


def test_the_loss_and_metrics_that_a_trainer_names_measure_the_same_in_another():
    loss, metrics = cx.Task(cx.CrossEntropyLoss(ignore_index=0), output=0), cx.Metrics({"f1": cx.F1()})
    one = DistributedTrainer(mlp(), loss, optax.sgd(0.1), metrics=metrics)
    assert (one.loss_fn, one.metrics) == (loss, metrics)
