"""Another rate, seed, model or data on a run folder: one line each at the resume, before training goes on."""

import re
from types import SimpleNamespace

import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.config.load import load_config
from cyxjax.errors import OtherStateError
from cyxjax.train.comparison import changed_keys
from cyxjax.train.experiment import run
from cyxjax.train.fingerprints import config_of
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import VAL, X, Y, config, trainer
from tests.support.trainers import own_group as own_group


class Affine(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x)


SAID = "the configuration changed since the checkpoint: "
FILE = """
model: {name: mlp, options: {hidden: [8]}}
data: {name: digits}
optimizer: {name: momentum, lr: 0.01}
schedule: {name: constant}
epochs: 1
max_steps: 2
global_batch_size: 64
verbose: false
report: false
max_eval_batches: 1
"""


def test_a_run_folder_is_told_what_is_other_and_where_it_matters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(FILE)
    words = ["--config", "x.yaml"]
    run(load_config(words))
    assert SAID not in capsys.readouterr().err
    run(load_config([*words, "--max-steps", "3", "--sinks", "csv"]))
    assert SAID not in capsys.readouterr().err  # how far and what is seen is no other training
    other = ["--optimizer.lr", "0.02", "--seed", "7", "--optimizer.options.nesterov", "true"]
    run(load_config([*words, "--max-steps", "4", *other]))
    lines = [line.partition(SAID)[2] for line in capsys.readouterr().err.splitlines() if SAID in line]
    assert lines == [
        "seed was 42, is 7.",
        "optimizer.options.nesterov was not given, is True.",
        "optimizer.lr was 0.01, is 0.02.",
    ]


def test_of_a_program_the_rate_is_known(tmp_path, capsys):
    for lr in (0.1, 0.05):
        trainer(lr=lr).fit(
            X, Y, config(checkpoint_dir=str(tmp_path), checkpoint_every_n_epochs=1, resume="auto")
        )
    # The second one found all its epochs done, and says so all the same.
    assert f"{SAID}optimizer.lr was 0.1, is 0.05." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"a": 1, "old": None}, {"a": 1, "new": 3, "old": ()}, []),
        (
            {"model": {"name": "mlp", "options": {}}},
            {"model": {"name": "cnn", "options": {}}},
            ["model.name"],
        ),
        ({"epochs": 2}, {"epochs": 3}, []),
        # A decay to the end of the run is another one where the end is.
        ({"epochs": 2}, {"epochs": 3, "schedule": {"name": "cosine", "decay_steps": None}}, ["epochs"]),
        ({"epochs": 2}, {"epochs": 3, "schedule": {"name": "cosine", "decay_steps": 9}}, []),
        ({"comm_options": {"rank": 2}}, {"comm_options": {"rank": 4}}, ["comm_options.rank"]),
        (None, {"a": 1}, []),
        (
            {"max_grad_norm": None, "lora": None, "betas": (0.9, 0.99)},
            {"max_grad_norm": 1.0, "lora": {"rank": 2}, "betas": [0.9, 0.99], "later": 1},
            ["max_grad_norm", "lora.rank"],
        ),
        ({}, {"model": {"options": {"hidden": [8]}}}, []),  # the first run of all
    ],
)
def test_what_is_compared(then, now, said):
    found = [line.removeprefix(SAID).split(" was ")[0] for line in changed_keys(then, now)]
    assert found == said


def recipe(optimizer, *callbacks):
    return SimpleNamespace(optimizer=optimizer, callbacks=callbacks)


def test_what_a_program_gave_is_told_as_far_as_it_is_numbers():
    scheduled = config_of({}, recipe(cx.SGDOptimizer(lambda step: 0.1)))
    assert scheduled["optimizer"]["name"] == "SGDOptimizer"
    assert "lr" not in scheduled["optimizer"]
    adam = config_of({}, recipe(cx.AdamOptimizer(0.1), cx.EarlyStopping(1), cx.EMA()))
    assert adam["callbacks"] == "EMA"  # the other is no part of the step
    assert adam["optimizer"].items() >= {"name": "AdamOptimizer", "lr": 0.1, "betas": (0.9, 0.999)}.items()
    assert config_of({}, recipe(optax.sgd(0.1))) == {"callbacks": "none"}
    assert config_of({"optimizer": {"lr": 1}}, recipe(cx.SGDOptimizer(0.1))) == {"optimizer": {"lr": 1}}


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (
            {},
            {"optimizer": cx.MomentumOptimizer(0.2)},
            "optimizer.name was 'SGD.*', is 'Momentum.*'",
        ),
        ({}, {"optimizer": cx.SGDOptimizer(0.1, momentum=0.9)}, "optimizer.momentum was 0.0, is 0.9 .*trace"),
        ({}, {"callbacks": [cx.EMA()]}, "callbacks was 'none', is 'EMA'"),
        ({}, {"comm": "local_sgd"}, "comm was 'mean', is 'local_sgd'"),
        ({}, {"precision": "float16"}, "precision was 'float32', is 'float16'"),
        ({"optimizer": optax.sgd(0.1)}, {"optimizer": optax.sgd(0.1, 0.9)}, r"its model or optimizer \("),
        ({}, {"model": cx.SequentialModel([cx.LinearModule(6, 3)])}, r"its model or optimizer \(.*params/"),
        ({}, {"X": X[:, :5], "model": Affine()}, r"a sample was .*6.*float32.*, is .*5.*float32"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_was_set_otherwise(first, then, said, tmp_path):
    def fit(model=None, optimizer=None, callbacks=(), X=X, **values):
        one = DistributedTrainer(
            model or Affine(), cx.CrossEntropyLoss(), optimizer or cx.SGDOptimizer(0.1), callbacks=callbacks
        )
        kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
        return one.fit(X, Y, config(**kept, **values))

    fit(epochs=1, **first)
    with pytest.raises(OtherStateError) as refused:
        fit(epochs=2, **then)
    text = str(refused.value)
    assert re.search(f"^the checkpoint is of another run than this: .*{said}", text), text
    assert f"HINT: set it as it was; or start over with its parameters: init_from: {tmp_path}" in text
    assert len(text) < 600


def test_sums_of_other_metrics_are_not_gone_on_with(tmp_path):
    def measure(name, **metrics):
        train = cx.distributed.DistributedTrainer(
            cx.SequentialModel([cx.LinearModule(6, 3)]),
            cx.CrossEntropyLoss(),
            cx.SGDOptimizer(0.1),
            metrics=cx.Metrics(metrics),
        )
        cfg = config(checkpoint_dir=str(tmp_path), checkpoint_every_n_steps=1, resume="auto", shuffle=False)
        cfg.epochs, cfg.max_steps = 1, 1 if name == "first" else None
        cfg.batch_size = 1
        return train.fit(X, Y, *VAL, cfg)

    measure("first", ones=lambda o, t: o[:, 0] * 0 + 1)
    history = measure("second", twos=lambda o, t: o[:, 0] * 0 + 2)
    assert history.metrics["train_twos"] == [2.0]  # 1.87 with the sums of the other


def test_another_augment_is_told_and_what_is_not_known_is_not(tmp_path, capsys):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    for epochs, augment in enumerate([None, None, lambda key, x: x * 2, lambda key, x: x * 3], 1):
        one = DistributedTrainer(Affine(), cx.CrossEntropyLoss(), optax.sgd(0.1), augment=augment)
        one.fit(X, Y, config(epochs=epochs, **kept))
        lines = [line for line in capsys.readouterr().err.splitlines() if "augment" in line]
        assert len(lines) == (epochs > 2)
    assert re.search(r"augment was 'a function \w{12} \(jax .*\)', is 'a function \w{12} \(jax", lines[0])
    assert (
        changed_keys({"a": 1, "augment": "a function 1 (jax 1)"}, {"a": 1, "augment": "a function 2 (jax 2)"})
        == []
    )
    assert changed_keys({"a": 1}, {"a": 1, "augment": "none"}) == []
    assert changed_keys({"a": 1, "augment": "none"}, {"a": 1}) == []
