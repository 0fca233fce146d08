"""A loss by its name in a file, with options as everything else that is named."""

import types

import jax.numpy as jnp
import pytest

from cyxjax.config.experiment import TrainConfig
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError
from cyxjax.train.start.named import LOSSES, METRICS, loss_of, metrics_of

CLASSES = types.SimpleNamespace(task="classification", num_classes=3)


def half(output, target, factor=0.5):
    return factor * (output - target) ** 2


def made(name, **options):
    return loss_of(TrainConfig(loss={"name": name, "options": options}), CLASSES)


def test_options_make_a_loss_of_ours():
    assert made("cross_entropy", label_smoothing=0.1).label_smoothing == 0.1
    assert made("auto", ignore_index=0).ignore_index == 0
    assert TrainConfig(loss={"name": "mse"}).loss == "mse"  # as it was written into run folders before


def test_options_are_further_keywords_of_a_function():
    loss = made("tests.unit.train.test_named_loss:half", factor=2.0)
    assert loss(jnp.float32(3), jnp.float32(1)) == 8.0


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("cross_entropy", {"smooth": 0.1}, "'cross_entropy' .*'smooth'"),
        ("cross_entropy", {"label_smoothing": "much"}, "label_smoothing='much'"),
        ("msee", {"by": 2}, "loss='msee'.*'mse'"),
    ],
)
def test_what_a_loss_does_not_take_is_refused(name, options, told):
    with pytest.raises(ConfigError, match=told):
        made(name, **options)


@pytest.mark.parametrize("loss", [3, {"nam": "mse"}, {"name": "mse", "options": [1]}])
def test_what_names_no_loss_is_refused(loss):
    with pytest.raises(ConfigError, match="loss = .*expected"):
        TrainConfig(loss=loss)


@pytest.mark.parametrize("name", LOSSES)
def test_each_name_makes_its_loss(name):
    assert type(loss_of(TrainConfig(loss=name), CLASSES)) is type(LOSSES[name])


@pytest.mark.parametrize("name", METRICS)
def test_each_name_makes_its_metric(name):
    config = TrainConfig(metrics=({"name": name, "options": {"k": 2} if name == "top_k" else {}},))
    facts = DatasetInfo("own", "classification", 3, (4,), class_names=("a", "b", "c"))
    assert metrics_of(config, facts).num_rows > metrics_of(TrainConfig(), facts).num_rows
