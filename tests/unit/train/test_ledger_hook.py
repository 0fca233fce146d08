"""A run records what it consumed; `cyxjax audit` finds the one batch somebody tampered with."""

import json

import jax
import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.cli import audit
from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.mesh import build_mesh
from cyxjax.data.batches import BatchPlan
from cyxjax.data.ledger_file import read_ledger
from cyxjax.data.order import Order
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import DataError
from cyxjax.train.feeding import feed
from cyxjax.train.feeding.placing import RowPlacer
from cyxjax.train.hooks.hook import Position
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.trainer import DistributedTrainer

SAMPLES = 50  # 16 a step: 4 steps an epoch, the last of 2 samples


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 4)).astype(np.float32), rng.integers(0, 3, SAMPLES).astype(np.int32)


def fit(folder, **changes):
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1))
    options = {"epochs": 3, "global_batch_size": 16, "run_dir": str(folder), "checkpoint_every_n_steps": 5}
    trainer.fit(*data(), config=TrainConfig(**{"verbose": False} | options | changes))
    return trainer


def tamper(monkeypatch, bad_step, change):
    """Lets `change(ids)` be read in the step `bad_step` (counted over epochs of 4)."""
    real = Order.__getitem__
    first = bad_step % 4 * 16

    def reading(self, places):
        ids = real(self, places)
        if self.epoch == bad_step // 4:
            ids[places == first] = change(ids[places == first])
        return ids

    monkeypatch.setattr(Order, "__getitem__", reading)


def test_a_run_resumed_in_the_middle_of_an_epoch_is_whole(tmp_path, capsys):
    fit(tmp_path, max_steps=7)
    fit(tmp_path)
    assert audit.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3 epochs of 50 samples, 150 in all" in shown
    assert "every sample came once per epoch" in shown
    spans = [record.span for record in read_ledger(tmp_path / "ledger.jsonl").records]
    assert sum(span.steps for span in spans) == 12
    # a span ends at every save (steps 5, 7, 10 and the ends of epochs) and at the end of an epoch
    assert [span[:4] for span in spans] == [
        (0, 0, 50, 4),
        (1, 0, 16, 1),
        (1, 16, 48, 2),
        (1, 48, 50, 1),
        (2, 0, 32, 2),
        (2, 32, 50, 2),
    ]


def test_steps_made_again_count_once(tmp_path, capsys):
    fit(tmp_path, max_steps=7)
    # As if it had died before the save at its end: the save of step 5 is the newest.
    (newest,) = (tmp_path / "checkpoints").glob("step_*7")
    newest.rename(tmp_path / "gone")
    fit(tmp_path)
    assert audit.main([str(tmp_path)]) == 0
    assert "14 steps, 2 of them made again after a restart" in capsys.readouterr().out


def test_one_sample_read_in_the_place_of_another_is_found(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        tamper(patched, 6, lambda ids: (ids + 1) % SAMPLES)
        fit(tmp_path)
    assert audit.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "step 5: altered: steps 5 to 7 have 34 samples that are not the 34 of places 16"
    )
    assert len(lines) == 2


def test_a_checkpoint_of_another_past_is_found(tmp_path, capsys):
    fit(tmp_path)
    *lines, last = (tmp_path / "ledger.jsonl").read_text().splitlines()
    changed = json.dumps(json.loads(last) | {"sum": "0" * 16})
    (tmp_path / "ledger.jsonl").write_text("\n".join([*lines, changed]) + "\n")
    assert audit.main([str(tmp_path)]) == 1
    assert "the checkpoint of step 12 was trained on other samples" in capsys.readouterr().out


def test_a_changed_seed_is_told_at_the_resume_and_by_the_audit(tmp_path, capsys):
    fit(tmp_path, max_steps=6)  # two steps into epoch 1
    fit(tmp_path, seed=1, verbose=True)
    shown = capsys.readouterr().out
    assert "Resumed with other samples or steps: seed is 1, was 42." in shown
    assert "WARNING: the order of samples changed after 32 samples of epoch 1" in shown
    assert audit.main([str(tmp_path)]) == 1
    assert "reordered: the order was changed after 32 samples of epoch 1" in capsys.readouterr().out


def test_damage_in_the_middle_is_mended_at_the_resume(tmp_path, capsys):
    fit(tmp_path, max_steps=11)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"samples": 16', '"samples": 17')
    path.write_text("\n".join(lines) + "\n")
    assert audit.main([str(tmp_path)]) == 1
    fit(tmp_path, verbose=True)
    assert "11 steps before the checkpoint; they were written again" in capsys.readouterr().out
    assert audit.main([str(tmp_path)]) == 0


def test_loaders_have_no_ids_and_leave_no_ledger(tmp_path):
    x, y = data()
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1))

    class Loader:
        def __iter__(self):
            return iter([(x[:16], y[:16]), (x[16:32], y[16:32])])

    trainer.fit(Loader(), None, TrainConfig(verbose=False, epochs=1, run_dir=str(tmp_path)))
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(DataError, match=r"ledger\.jsonl"):
        audit.main([str(tmp_path)])


def test_what_the_feed_notes_does_not_depend_on_the_replicas():
    x, y = data()
    taken = []
    for devices in (1, 4):
        tape, plan = Tape(), BatchPlan(SAMPLES, 16 // devices, devices)
        mesh = build_mesh(jax.devices()[:devices])
        ours = feed.dataset_feed(
            RowPlacer(mesh), ArrayDataset(x, y), plan, None, seed=3, shuffle=True, depth=0, tape=tape
        )
        assert len(list(ours.train(Position(0, 0, 16, 1), lambda: (False, False)))) == 3
        taken.append(tape.take((1, 0)))
    assert taken[0] == taken[1]
    assert [(noted.first, noted.stop) for noted in taken[0]] == [(16, 32), (32, 48), (48, 50)]
    assert [noted.found.samples for noted in taken[0]] == [16, 16, 2]
