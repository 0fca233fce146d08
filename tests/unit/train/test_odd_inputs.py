"""Samples, weights and outputs that no training can be right with: one line, and the trainer is as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.losses import as_per_example
from cyxjax.core.objective.log_probabilities import refuse_scores, takes_log_probabilities
from cyxjax.core.objective.loss_calls import refuse_other_arguments
from cyxjax.errors import CheckpointError, ConfigError, DataError
from tests.support.trainers import CLASSES, X, Y, config, trainer
from tests.support.trainers import own_group as own_group

IGNORED = np.full(len(Y), -100, np.int32)


class Places(linen.Module):
    """Takes rows of any length."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(x[:, :, None]).mean(1)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(CLASSES)(x)


def test_another_length_is_fine_where_the_model_takes_it():
    train = trainer(Places())
    train.fit(X, Y, config(epochs=1))
    assert train.predict(X[:, :4]).shape == (len(X), CLASSES)


def test_a_mean_of_nothing_is_refused():
    ignoring = cx.CrossEntropyLoss(ignore_index=-100)
    with pytest.raises(
        DataError, match=r"no sample of an epoch of training weighs anything.*HINT: .*ignore_index"
    ):
        trainer(Net(), ignoring).fit(X, IGNORED, config(epochs=1))
    train = trainer(Net(), ignoring)
    with pytest.raises(DataError, match="no sample of the data evaluated on weighs anything"):
        train.fit(X, Y, X, IGNORED, config(epochs=1))
    half = np.where(np.arange(len(Y)) < 40, IGNORED, Y)  # steps in which nothing counts are no harm
    history = train.fit(X, half, config(epochs=1, shuffle=False))
    assert np.isfinite(history.train_losses[0])


def test_scores_are_no_log_probabilities():
    normal = np.asarray(jax.nn.log_softmax(jnp.asarray(X)))
    nll = as_per_example(cx.NLLLoss())
    in_part = as_per_example(cx.Task({"a": cx.NLLLoss(), "b": cx.CrossEntropyLoss()}, output="scores"))
    for loss, form in ((nll, lambda o: o), (in_part, lambda o: {"scores": o, "other": o})):
        assert takes_log_probabilities(loss)
        refuse_scores(loss, form(normal))
        refuse_scores(
            loss, form(np.where(np.arange(6) == 2, -np.inf, 0) - np.log(5))
        )  # a class that is masked
        for wrong in (X, np.exp(normal)):
            with pytest.raises(
                DataError, match=r"sum to [\d.e+]+\. HINT: cx\.CrossEntropyLoss\(\) takes raw"
            ):
                refuse_scores(loss, form(wrong))
    assert not takes_log_probabilities(as_per_example(cx.CrossEntropyLoss()))
    with pytest.raises(DataError, match="NLLLoss takes log-probabilities"):
        trainer(Net(), cx.NLLLoss()).fit(X, Y, config(epochs=1))


@pytest.mark.parametrize("fn", [optax.losses.kl_divergence, optax.losses.kl_divergence_with_log_targets])
def test_a_divergence_of_scores_would_fall_without_end(fn):
    loss = as_per_example(fn)
    refuse_scores(loss, np.full((2, 4), np.log(0.25)))
    with pytest.raises(DataError, match=f"^{fn.__name__} takes log-probabilities"):
        refuse_scores(loss, X)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, rngs, batch: 0.0, r"takes \(model, rngs, batch\), .*HINT: leave the model's call out"),
        (lambda params, batch: 0.0, r"takes \(params, batch\), a step calls it with \(output, target\)"),
        (lambda output, target, mask: 0.0, r"takes \(output, target, mask\), .*HINT: lambda output, target"),
        (lambda output: 0.0, r"takes \(output\), "),
    ],
)
def test_a_loss_of_other_arguments_is_told_how_it_is_called(loss, said):
    for given in (loss, cx.Task({"a": loss, "b": cx.CrossEntropyLoss()})):
        with pytest.raises(ConfigError, match=said):
            trainer(Net(), given).fit(X, Y, config(epochs=1))
    refuse_other_arguments(as_per_example(lambda o, t, scale=2.0: scale * o.sum(-1)))
    refuse_other_arguments(as_per_example(optax.losses.squared_error))


def asymmetric(y_true, y_pred):
    return optax.softmax_cross_entropy(y_pred, y_true)


@pytest.mark.parametrize(
    ("loss", "is_symmetric"),
    [
        (lambda y_true, y_pred: jnp.square(y_true - y_pred).mean(-1), True),
        (lambda y_true, y_pred: jnp.abs(y_true - y_pred).mean(), True),
        (lambda y_true, y_pred: optax.cosine_distance(y_true, y_pred), True),
        (lambda target, prediction: -2 * (target * prediction).sum(-1) / (target + prediction).sum(-1), True),
        (asymmetric, False),
        (lambda y_true, y_pred: jnp.square(jax.lax.stop_gradient(y_true) - y_pred).mean(-1), False),
        (lambda y_true, y_pred: (y_true - y_pred).mean(-1), False),
        (lambda y_true, y_pred: (jnp.abs(y_true - y_pred) / y_true).mean(-1), False),
    ],
    ids=["squared", "absolute", "cosine", "dice", "cross entropy", "stopped", "bias", "relative"],
)
def test_a_loss_that_takes_the_target_first_is_taken_where_that_changes_nothing(loss, is_symmetric):
    output = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    if is_symmetric:
        refuse_other_arguments(as_per_example(loss), output)
        return
    with pytest.raises(ConfigError, match=r"a step calls it with \(output, target\)"):
        refuse_other_arguments(as_per_example(loss), output)


_NAMED = "y_true,y_pred target,output labels,logits y,y_hat targets,predictions"


def test_a_loss_that_names_the_target_first_is_refused_and_no_other_order_is():
    for names in _NAMED.split():
        with pytest.raises(ConfigError, match=r"takes \(\w+, \w+\), .*HINT: .*: loss\(target, output\)\.$"):
            refuse_other_arguments(as_per_example(eval(f"lambda {names}: 0.0")))
        refuse_other_arguments(as_per_example(eval(f"lambda {','.join(names.split(',')[::-1])}: 0.0")))
    for names in ("a,b", "x,y", "y,t", "y,target", "output,y", "x,labels,*output", "labels,*output"):
        refuse_other_arguments(as_per_example(eval(f"lambda {names}: 0.0")))


def test_a_run_that_must_go_on_makes_no_folder(tmp_path):
    saving = {"checkpoint_dir": str(tmp_path / "runs" / "checkpoints"), "checkpoint_every_n_epochs": 1}
    with pytest.raises(CheckpointError, match="resume='must', but .* holds no checkpoint"):
        trainer(Net()).fit(X, Y, config(resume="must", **saving))
    assert list(tmp_path.iterdir()) == []
