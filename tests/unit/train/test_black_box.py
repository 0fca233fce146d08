"""A step that is not finite leaves a black box; its replay gives the same numbers and names the cause."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import linen, nnx

from cyxjax.cli import audit
from cyxjax.config.load import load_config
from cyxjax.core.trees import named_leaves
from cyxjax.data.order import Order
from cyxjax.errors import DataError, NonFiniteError
from cyxjax.train import experiment
from cyxjax.train.hooks.black_box import read_box
from cyxjax.train.replay import steps
from cyxjax.train.replay.inspect import first_nonfinite
from cyxjax.weights.read import read_weights
from tests.support.trainers import use_devices

SAMPLES = 48  # 16 per step: 3 steps per epoch


class Fragile(linen.Module):
    """Divides by zero for a sample whose first feature is 7."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, name="first")(x) / (x[:, :1] - 7.0)
        return linen.Dense(2, name="last")(x)


class Shell(linen.Module):
    @linen.compact
    def __call__(self, x):
        return Fragile(name="body")(x)


@pytest.fixture
def setting(request, tmp_path, monkeypatch):
    """A function (bad sample, options) -> configuration of a run that breaks at that sample.

    Its parameter is the number of devices, 2 if there is none.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(SAMPLES, 3)).astype(np.float32), rng.normal(size=(SAMPLES, 2)).astype(np.float32)
    monkeypatch.setattr(experiment, "model_of", lambda section, info, seed: Shell())
    use_devices(getattr(request, "param", 2))
    monkeypatch.setattr(experiment.process_group, "init", lambda **options: None)
    monkeypatch.setattr(experiment.process_group, "finalize", lambda: None)

    def make(bad, **options):
        broken = x.copy()
        broken[bad, 0] = 7.0
        parts = {"train": (broken, y), "val": (x[:8], y[:8]), "test": (x[:8], y[:8])}
        named = {f"{n}_{k}": a for k, pair in parts.items() for n, a in zip("xy", pair, strict=True)}
        np.savez(tmp_path / "data.npz", **named)
        values = {
            "run_dir": str(tmp_path / "run"),
            "epochs": 4,
            "global_batch_size": 16,
            "checkpoint_every_n_steps": 2,
            "verbose": False,
            "report": False,
            "loss": "mse",
            "data": {"name": "npz", "root": str(tmp_path / "data.npz")},
            "optimizer": {"name": "sgd", "lr": 0.01},
        }
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(values | options))
        return load_config(["--config", str(path)])

    return make


@pytest.mark.parametrize("setting", [1, 2], indirect=True)
def test_an_aborted_run_is_replayed_to_the_layer(setting, tmp_path, printed):
    with pytest.raises(NonFiniteError, match="loss .*step 3 "):
        experiment.run(setting(bad=11, callbacks=["EarlyStopping", "ReduceLROnPlateau"]))
    (folder,) = (tmp_path / "run").glob("black_box_step*")
    box = read_box(folder)
    assert 11 in box.sample_ids
    assert len(box.sample_ids) == 16
    assert folder.stat().st_mode & 0o077 == 0
    shown = printed(steps.main, folder)
    assert shown.splitlines()[1].startswith("ReduceLROnPlateau ")
    assert "EarlyStopping" not in shown
    for part in (
        f"Replayed: step {box.step} is the first that is not finite: loss {box.loss}",
        "layer body/last (Dense): invalid value (nan)",
        "layer body (Fragile): invalid value (inf) encountered in div",
    ):
        assert part in shown
    assert re.search(r"test_black_box\.py:\d+ \(__call__\)", shown)
    assert "linen_models.py" not in shown  # through which each layer is called
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("seed: 42", "seed: 43"))
    for box, message in ((folder, r"black_box_step3 .*\(36, 32, 5"), (tmp_path, r"box\.json")):  # other data
        with pytest.raises(DataError, match=message):
            steps.main([str(box)])


def test_a_micro_batch_without_samples_before_the_bad_one_is_passed_over(setting, tmp_path, printed):
    """The last 12 samples fill the first micro-batch of both replicas; the last one is of replica 1."""
    short = {"global_batch_size": 36, "gradient_accumulation_steps": 2, "shuffle": False}
    with pytest.raises(NonFiniteError, match="step 2 "):
        experiment.run(setting(bad=SAMPLES - 1, **short))
    shown = printed(steps.main, tmp_path / "run/black_box_step2")
    assert "(replica 1, micro-batch 0, forward): layer body (Fragile)" in shown


@pytest.mark.parametrize(
    "options",
    [
        {"comm": "fsdp"},
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in (
                {"comm": "fsdp", "comm_options": {"regather": False}, "lora": {"rank": 2}},
                {"comm": "local_sgd"},
            )
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_step_of_two_replicas_is_looked_into_with_the_whole_parameters_of_each(
    options, setting, tmp_path, printed
):
    with pytest.raises(NonFiniteError, match="loss .*step 3 "):
        experiment.run(setting(bad=11, **options))
    (folder,) = (tmp_path / "run").glob("black_box_step*")
    assert read_box(folder).num_replicas == 2
    shown = printed(steps.main, folder)
    # Every second sample of a step belongs to the second replica; only sample 11 is divided by zero.
    place = read_box(folder).sample_ids.index(11)
    assert f"First not finite (replica {place % 2}, micro-batch 0, forward): layer body (Fragile)" in shown


def test_a_replay_from_a_checkpoint_has_the_rates_of_the_run(setting, tmp_path):
    with pytest.raises(NonFiniteError, match="loss .*step 3 "):
        experiment.run(setting(bad=11, schedule={"name": "linear"}, checkpoint_async=False))
    (folder,) = (tmp_path / "run").glob("black_box_step*")
    trainer, _, _ = steps._rebuilt(read_box(folder), folder)
    assert trainer.run_state.position.step == 2
    assert trainer.program.learning_rate(3) == pytest.approx(0.01 * (1 - 2 / 12))


def test_a_skipped_step_is_replayed_from_before_it(setting, tmp_path, capsys, printed):
    for _ in range(2):  # the second finds all epochs done
        experiment.run(setting(bad=11, on_nonfinite="skip", checkpoint_async=False, verbose=True))
    shown = capsys.readouterr().out
    folders = sorted((tmp_path / "run").glob("black_box_step*"), key=lambda p: read_box(p).step)
    assert len(folders) == 3  # one per epoch; the fourth repeats them
    assert all(f"`cyxjax replay {folder}`" in shown for folder in folders)
    assert shown.count("4 steps left out, not finite") == 2
    assert read_box(folders[0]).loss == "left out"
    assert read_box(folders[0]).checkpoint_step == 2  # not among the last three that the run kept
    assert "layer body (Fragile)" in printed(steps.main, folders[0])


def test_a_run_whose_early_checkpoints_are_gone_is_replayed_from_its_first_parameters(setting, tmp_path):
    experiment.run(setting(bad=[], epochs=1, run_dir=str(tmp_path / "earlier")))
    begun = {"init_from": {"path": str(tmp_path / "earlier")}, "on_nonfinite": "skip"}
    (first,) = Order(SAMPLES, 42, 0)[np.arange(1)]
    experiment.run(setting(bad=first, epochs=1, **begun))
    (folder,) = (tmp_path / "run").glob("black_box_step*")
    trainer, _, _ = steps._rebuilt(read_box(folder), folder)
    found = read_weights(tmp_path / "earlier").arrays
    for name, leaf in named_leaves(trainer.params):
        np.testing.assert_array_equal(leaf, found[f"params/{name}"].read())


def test_a_second_bad_step_after_one_checkpoint_is_replayed_past_the_first(setting, tmp_path, printed):
    # Steps 3 of the first epoch, 1 and 3 of the second are bad, all after the checkpoint of step 2.
    experiment.run(setting(bad=[11, 36], on_nonfinite="rollback", epochs=2))
    run = (tmp_path / "run").rename(tmp_path / "moved")
    shown = printed(steps.main, run / "black_box_step4")
    assert "from step 2." in shown
    assert "Replayed: step 4 is the first" in shown
    for name, bad in (("black_box_step3", 11), ("black_box_step3_epoch2_sample0", 36)):
        assert bad in read_box(run / name).sample_ids
        assert "Replayed: step 3 is the first" in printed(steps.main, run / name)


def test_rollback_leaves_the_bad_step_behind_and_the_ledger_whole(setting, tmp_path, capsys, printed):
    config = setting(bad=11, on_nonfinite="rollback", checkpoint_every_n_steps=1, epochs=2, verbose=True)
    experiment.run(config)
    shown = capsys.readouterr().out
    bad = re.findall(r"WARNING: step (\d+) was", shown)
    assert len(bad) == 2  # once per epoch
    assert "back to the checkpoint of step" in shown
    audited = printed(audit.main, config.run_dir)
    found = re.findall(r"steps (\d+) to (\d+): left out on purpose: a rollback", audited)
    assert found == [(step, step) for step in bad]  # with the same numbers


class NnxFragile(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.last = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.log(self.first(x) * 0 - 1))


def test_nnx_layers_pairs_and_healthy_models_are_told_apart():
    model, x = NnxFragile(nnx.Rngs(0)), jnp.ones((2, 3))
    before = nnx.Linear.__call__
    (found,) = first_nonfinite(model, lambda: model(x))
    assert found.startswith("NnxFragile itself: ")
    assert "test_black_box.py:" in found
    model.first.kernel[...] = jnp.full((3, 3), jnp.nan)
    assert first_nonfinite(model, lambda: model(x))[0].startswith("layer first (Linear): ")
    assert nnx.Linear.__call__ is before
    assert first_nonfinite((None, None), lambda: jnp.log(x - 2))[0].startswith("the model: ")
    assert first_nonfinite((None, None), lambda: x / (x - 1))[0].startswith("the model: invalid value (inf)")
    assert first_nonfinite((None, None), lambda: x + 1) == []
    assert jnp.isnan(jax.jit(jnp.log)(-1.0))  # the checks are off again
