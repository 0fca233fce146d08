"""Messages of a resume about changed configuration, data and code, and errors for ranks that differ."""

import json
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.config.load import load_config
from cyxjax.data.streams import Batches
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, DesyncError, OtherStateError
from cyxjax.train import comparison, fingerprints, plan
from cyxjax.train.comparison import changed_keys
from cyxjax.train.experiment import run
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.fingerprints import Facts, config_of
from tests.support.trainers import X, Y, config, trainer

START = "the configuration changed since the checkpoint: "
FILE = """
model: {name: "tests.support.brought:Net"}
data: {name: "tests.support.brought:data"}
optimizer: {name: momentum, lr: 0.01}
schedule: {name: constant}
epochs: 1
max_steps: 2
global_batch_size: 8
verbose: false
report: false
max_eval_batches: 1
"""


def fit(folder, model=None, optimizer=None, callbacks=(), augment=None, data=(X[:24], Y[:24]), **values):
    one = trainer(model or linen.Dense(3), optimizer=optimizer, callbacks=callbacks, augment=augment)
    kept = {"checkpoint_dir": str(folder), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    return one.fit(*data, config(**kept | values))


# ---- a resume ----------------------------------------------------------------------------------------------


class Bent(linen.Module):
    """A layer that may be written anew, with parameters of the same shapes."""

    bend: Any = staticmethod(linen.relu)

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(self.bend(x))


PROGRAM = "the program of a step changed"


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("other", [{"model": Bent(linen.tanh)}, {"optimizer": optax.sgd(0.2, momentum=0.5)}])
def test_another_model_or_optimizer_of_the_same_shapes_is_noticed(other, tmp_path, capsys):
    """Without it a finished run gave the results of the first model for the second."""
    same = {"model": Bent(), "optimizer": optax.sgd(0.1, momentum=0.5)}
    for name, values in (("whole", {}), ("cut", {"max_steps": 2})):
        fit(tmp_path / name, **same, epochs=1, **values)
    fit(tmp_path / "whole", **same, epochs=1)
    fit(tmp_path / "whole", **same, epochs=2, batch_size=2)
    assert PROGRAM not in capsys.readouterr().err
    fit(tmp_path / "cut", **same | other, epochs=1)
    assert PROGRAM in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path / "whole", **same | other, epochs=2, batch_size=2)
    assert caught.value.key == "run_dir"


def test_a_finished_run_of_a_file_is_not_that_of_another_augmentation(tmp_path):
    then, now = ({"data": {"augment": [name]}} for name in ("flip", "crop"))
    comparison.refuse_finished({"config": then}, Facts(then), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.augment"):
        comparison.refuse_finished({"config": then}, Facts(now), tmp_path)


@pytest.mark.parametrize("name", ["process_count", "local_device_count", "default_backend"])
def test_programs_are_compared_on_equal_processes_and_devices_only(name, monkeypatch):
    """Another number of processes packs the reductions otherwise: the same model has another program."""
    one = trainer(linen.Dense(3))
    step, lowered = one.prepare(X, Y, config=config()).settings.step, jax.jit(lambda x: x + 1).lower(1.0)
    here = fingerprints.program_of(lowered, step, one.recipe.metrics)
    assert here == fingerprints.program_of(lowered, step, one.recipe.metrics)
    monkeypatch.setattr(jax, name, lambda: "other")
    there = fingerprints.program_of(lowered, step, one.recipe.metrics)
    assert (here["text"], here["of"] == there["of"]) == (there["text"], False)


@pytest.mark.usefixtures("two_devices")
def test_a_run_folder_is_told_what_is_other_and_where_it_matters(cwd, capsys):
    process_group.finalize()  # each run makes its own
    (cwd / "x.yaml").write_text(FILE)

    def changes(*words):
        run(load_config(["--config", "x.yaml", *words]))
        return [line.partition(START)[2] for line in capsys.readouterr().err.splitlines() if START in line]

    assert changes() == []
    assert changes("--max-steps", "3", "--sinks", "csv") == []  # length and output do not change the training
    other = ["--optimizer.lr", "0.02", "--seed", "7", "--optimizer.options.nesterov", "true"]
    assert changes("--max-steps", "4", *other) == [
        "seed was 42, is 7.",
        "optimizer.options.nesterov was not given, is True.",
        "optimizer.lr was 0.01, is 0.02.",
    ]


@pytest.mark.usefixtures("two_devices")
def test_a_resume_names_other_data_and_another_rate_and_says_nothing_of_the_same(tmp_path, capsys):
    for epochs in (1, 2):
        fit(tmp_path, epochs=epochs)
        assert "WARNING" not in capsys.readouterr().err
    kept = read_manifest(step_folder(tmp_path, list_steps(tmp_path)[-1])).meta[comparison.META]
    assert kept["data"]["training data"]["samples"] == 24
    assert "the code of cyxjax/core" in kept["code"]
    assert len(json.dumps(kept)) < 8000  # in every manifest
    other = np.where(np.arange(24) == 0, (Y[:24] + 1) % 3, Y[:24])
    fit(tmp_path, epochs=3, data=(X[:24], other), optimizer=cx.SGDOptimizer(0.05))
    stderr = capsys.readouterr().err
    assert stderr.count("WARNING: the training data changed since the checkpoint: sample 0: int32[1]") == 1
    assert f"{START}optimizer.lr was 0.1, is 0.05." in stderr
    assert stderr.count("WARNING") == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"data": (X[:24], (Y[:24] + 1) % 3)}, "training.*sample"),
        ({"optimizer": cx.SGDOptimizer(0.05)}, "lr"),
        ({"warmup_steps": 2}, "warmup_steps"),
    ],
)
@pytest.mark.parametrize("end", [{"epochs": 1}, {"epochs": 2, "max_steps": 1}])
def test_a_run_that_is_over_does_not_give_its_results_to_another(tmp_path, change, what, end):
    first = fit(tmp_path, **end)
    for batch_size in (4, 6):  # any, at each start
        assert fit(tmp_path, **end, batch_size=batch_size).train_losses == first.train_losses
    with pytest.raises(ConfigError, match=what) as refused:
        fit(tmp_path, **end, **change)
    assert refused.value.key == "run_dir"


@pytest.mark.usefixtures("two_devices")
def test_other_files_of_the_users_are_named_at_a_resume_and_at_a_load(tmp_path, capsys, monkeypatch):
    own = {"nets": ("1" * 12, "/home/me/nets.py"), "blocks": ("2" * 12, "/home/me/blocks.py")}
    for module in (comparison, plan):
        monkeypatch.setattr(module, "own_modules", lambda: own)
    fit(tmp_path, epochs=1)
    own["plots"] = "3" * 12, "/home/me/plots.py"  # did not exist then: nothing to compare
    trainer(linen.Dense(3)).load_checkpoint(str(tmp_path))
    assert "WARNING" not in capsys.readouterr().err
    own["blocks"] = "4" * 12, "/home/me/blocks.py"
    trainer(linen.Dense(3)).load_checkpoint(str(tmp_path))
    stderr = capsys.readouterr().err
    assert "WARNING: /home/me/blocks.py changed since the checkpoint was written: the loaded" in stderr
    assert "nets.py" not in stderr
    parts = comparison.code_facts() | {"the code of cyxjax/core": "0" * 12}
    monkeypatch.setattr(comparison, "code_facts", lambda: parts)
    fit(tmp_path, epochs=2)
    stderr = capsys.readouterr().err
    assert "WARNING: changed since the checkpoint: the code of cyxjax/core, /home/me/blocks.py." in stderr


@pytest.mark.parametrize(
    ("then", "now", "names"),
    [
        ({"a": 1, "old": None}, {"a": 1, "new": 3, "old": ()}, []),
        (
            {"model": {"name": "mlp", "options": {}}},
            {"model": {"name": "cnn", "options": {}}},
            ["model.name"],
        ),
        ({"epochs": 2}, {"epochs": 3}, []),
        # A decay to the end of the run changes with the end.
        ({"epochs": 2}, {"epochs": 3, "schedule": {"name": "cosine", "decay_steps": None}}, ["epochs"]),
        ({"epochs": 2}, {"epochs": 3, "schedule": {"name": "cosine", "decay_steps": 9}}, []),
        ({"comm_options": {"rank": 2}}, {"comm_options": {"rank": 4}}, ["comm_options.rank"]),
        (None, {"a": 1}, []),
        (
            {"max_grad_norm": None, "lora": None, "betas": (0.9, 0.99)},
            {"max_grad_norm": 1.0, "lora": {"rank": 2}, "betas": [0.9, 0.99], "later": 1},
            ["max_grad_norm", "lora.rank"],
        ),
        ({}, {"model": {"options": {"hidden": [8]}}}, []),  # the first run
        # A run of a configuration that a program continues, which does not name the model.
        (
            {
                **{"model": {"name": "mlp"}, "loss": "mse", "callbacks": [{"name": "EMA"}]},
                **{
                    "max_grad_norm": 0.5,
                    "comm_options": {"every": 3},
                    "optimizer": {"name": "adam", "lr": 1.0},
                },
            },
            {
                **{"max_grad_norm": None, "comm_options": {}, "callbacks": "EMA"},
                "optimizer": {"name": "AdamOptimizer", "lr": 2.0},
            },
            ["optimizer.lr", "max_grad_norm", "comm_options.every"],
        ),
        # Facts from a different version of jax, or missing on one side, are not compared.
        ({"a": 1, "augment": "a function 1 (jax 1)"}, {"a": 1, "augment": "a function 2 (jax 2)"}, []),
        ({"a": 1}, {"a": 1, "augment": "none"}, []),
        ({"a": 1, "augment": "none"}, {"a": 1}, []),
    ],
)
def test_what_is_compared(then, now, names):
    found = [line.removeprefix(START).split(" was ")[0] for line in changed_keys(then, now)]
    assert found == names


def made(rule, *callbacks, **values):
    """The known facts about the configuration of a program."""
    return config_of(values, SimpleNamespace(optimizer=rule, callbacks=callbacks))


def test_what_a_program_gave_is_told_as_far_as_it_is_numbers():
    scheduled = made(cx.SGDOptimizer(lambda step: 0.1))["optimizer"]
    assert (scheduled["name"], "lr" in scheduled) == ("SGDOptimizer", False)
    adam = made(cx.AdamOptimizer(0.1), cx.EarlyStopping(1), cx.EMA())
    assert adam["callbacks"] == "EMA"  # the other one is not part of the step
    assert adam["optimizer"].items() >= {"name": "AdamOptimizer", "lr": 0.1, "betas": (0.9, 0.999)}.items()
    assert made(optax.sgd(0.1)) == {"callbacks": "none"}
    assert made(cx.SGDOptimizer(0.1), optimizer={"lr": 1}) == {"optimizer": {"lr": 1}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function: optimizer -> the folder of a checkpoint of a run with it."""
    folders = {}

    def save(optimizer):
        if optimizer not in folders:
            folders[optimizer] = tmp_path_factory.mktemp("saved")
            fit(folders[optimizer], epochs=1, optimizer=optimizer)
        return folders[optimizer]

    return save


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (
            None,
            {"optimizer": cx.MomentumOptimizer(0.2)},
            "optimizer.name was 'SGD.*', is 'Momentum.*'",
        ),
        (
            None,
            {"optimizer": cx.SGDOptimizer(0.1, momentum=0.9)},
            "optimizer.momentum was 0.0, is 0.9 .*trace",
        ),
        (None, {"callbacks": [cx.EMA()]}, "callbacks was 'none', is 'EMA'"),
        (None, {"comm": "local_sgd"}, "comm was 'mean', is 'local_sgd'"),
        (None, {"precision": "float16"}, "precision was 'float32', is 'float16'"),
        (optax.sgd(0.1), {"optimizer": optax.sgd(0.1, 0.9)}, r"its model or optimizer \("),
        (None, {"model": cx.SequentialModel([cx.LinearModule(6, 3)])}, r"its model or optimizer \(.*params/"),
        (None, {"data": (X[:24, :5], Y[:24])}, r"a sample was .*6.*float32.*, is .*5.*float32"),
    ],
)
@pytest.mark.usefixtures("two_devices")
def test_a_checkpoint_of_another_run_is_refused_by_what_was_set_otherwise(first, then, message, saved):
    folder = saved(first)
    with pytest.raises(OtherStateError) as refused:
        fit(folder, epochs=2, **then)
    text = str(refused.value)
    assert re.search(f"^the checkpoint is of another run than this: .*{message}", text), text
    assert f"init_from: {folder}" in text
    assert len(text) < 600


@pytest.mark.usefixtures("two_devices")
def test_sums_of_other_metrics_are_not_gone_on_with(tmp_path):
    def measure(max_steps, **metrics):
        one = trainer(linen.Dense(3), metrics=cx.Metrics(metrics))
        kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_steps": 1, "resume": "auto"}
        return one.fit(X[:24], Y[:24], config(epochs=1, max_steps=max_steps, **kept))

    measure(1, ones=lambda o, t: o[:, 0] * 0 + 1)
    history = measure(None, twos=lambda o, t: o[:, 0] * 0 + 2)
    assert history.metrics["train_twos"] == [2.0]  # 1.67 with the sums of the other


@pytest.mark.usefixtures("two_devices")
def test_another_augment_is_told(tmp_path, capsys):
    for epochs, augment in ((1, None), (2, lambda key, x: x * 2), (3, lambda key, x: x * 3)):
        fit(tmp_path, augment=augment, epochs=epochs)
        lines = [line for line in capsys.readouterr().err.splitlines() if "augment was" in line]
        assert len(lines) == (epochs > 1)
    assert re.search(r"augment was 'a function \w{12} \(jax .*\)', is 'a function \w{12} \(jax", lines[0])


# ---- ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["evaluate", "predict"])
@pytest.mark.usefixtures("two_devices")
def test_ranks_that_evaluate_or_predict_other_samples_are_refused(call, monkeypatch):
    """Each rank reads its share of its arguments: with different arrays the shares do not form one set."""
    one, notes = trainer(linen.Dense(3)), []
    one.fit(X[:24], Y[:24], config())
    run = (lambda x: one.evaluate(x, Y[: len(x)])) if call == "evaluate" else one.predict
    monkeypatch.setattr(one, "_group", ranks(2))
    monkeypatch.setattr(
        comparison, "agree", lambda group, call, note: notes.append(note) or notes[:1] + [note]
    )
    run(X)
    run(X.copy())
    with pytest.raises(DesyncError, match=f"{call}: .*60 .*30 "):
        run(X[::2])
    with pytest.raises(DesyncError, match=f"{call}: sample 0"):
        run(X + 1)


def ranks(world_size):
    return SimpleNamespace(topology=SimpleNamespace(world_size=world_size, is_master=True))


def test_ranks_whose_loaders_begin_with_the_same_samples_are_refused(monkeypatch):
    """torch's DDP trains on this silently if the DistributedSampler was forgotten."""
    notes = []
    monkeypatch.setattr(comparison, "agree", lambda group, call, note: notes.append(note) or notes)

    def start(x, y):
        comparison.compare_ranks(ranks(2), Facts({}), FitData(None, None, False, first=(x, y)))

    start(X[:8], Y[:8])
    start(X[8:16], Y[8:16])
    with pytest.raises(DesyncError, match="loaders .* 0 .* 2 .*DistributedSampler"):
        start(X[:8].copy(), Y[:8])
    notes.clear()
    for _ in range(2):  # constant rows prove nothing
        start(np.ones((8, 3), np.float32), np.zeros(8, np.int32))


LOADER = FitData(None, None, False, first=(X[:4], Y[:4]))
INDEXED = LOADER._replace(indexed=True, train=SimpleNamespace())
STREAM = INDEXED._replace(train=SimpleNamespace(first_digest=lambda: "b"))
EXACT = {"canary": "c"}
FACTS = Facts(made(cx.SGDOptimizer(0.1)), exact=EXACT)


def note_of(monkeypatch, facts=FACTS, data=INDEXED, program="a"):
    """The note that a rank sends to the others at its start."""
    notes = []
    monkeypatch.setattr(comparison, "is_shared", lambda train: hasattr(train, "first_digest"))
    monkeypatch.setattr(comparison, "agree", lambda group, what, note: notes.append(note) or notes)
    comparison.compare_ranks(ranks(2), facts._replace(program={"text": program}), data)
    return notes[0]


def compare(monkeypatch, *notes):
    monkeypatch.setattr(comparison, "agree", lambda group, what, note: list(notes))
    comparison.compare_ranks(ranks(len(notes)), FACTS, INDEXED)


def test_loaders_whose_ranks_have_other_programs_for_batches_of_one_shape_are_refused(monkeypatch):
    """A loss or metric that depends on the rank: the ranks would silently compute different values."""
    mine = note_of(monkeypatch, data=LOADER)
    smaller = mine | {"shapes": "(2, 4)", "program": "b", "first": "1"}
    compare(monkeypatch, mine, smaller, mine | {"first": "2"})
    with pytest.raises(DesyncError, match=r"program.*\ba .*rank 0.*\bc .*rank 2"):
        compare(monkeypatch, mine, smaller, mine | {"first": "2", "program": "c"})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((Facts(made(cx.SGDOptimizer(0.2)), exact=EXACT), INDEXED, "b"), "optimizer .*configuration"),
        (
            (Facts(made(cx.SGDOptimizer(0.1), cx.EMA()), exact=EXACT), INDEXED, "b"),
            "callbacks .*configuration",
        ),
        ((Facts(made(cx.SGDOptimizer(0.1)), exact={"canary": "d"}),), r"canary .*\bc\b.*\bd\b"),
        ((FACTS, INDEXED, "b"), r"program .*\ba\b.*\bb\b"),
        ((FACTS, STREAM), "stream .*shared=False"),
        ((FACTS, INDEXED._replace(order=(1, True))), "order .*loader.*seed=1"),
        ((FACTS, INDEXED._replace(val=Batches([]))), "validation data.*none.*a loader"),
    ],
)
def test_ranks_that_differ_are_named_it(other, message, monkeypatch):
    """If optimizers differ, so do the compiled steps, but the digest of a program names no cause."""
    mine = note_of(monkeypatch)
    compare(monkeypatch, mine, mine)
    with pytest.raises(DesyncError, match=message):
        compare(monkeypatch, mine, note_of(monkeypatch, *other))
