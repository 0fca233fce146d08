"""What an exact run keeps of what its bits hang on, and what it says when that has changed."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.exact.calls import Parts, named
from cyxjax.core.exact.step import Layout, PartsBatch, by_device
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.mesh import build_mesh, put_replicated
from cyxjax.core.step import TrainState
from cyxjax.data.batches import HostBatch
from cyxjax.errors import CheckpointError, ConfigError, DataError, DesyncError
from cyxjax.train import comparison, fingerprints
from cyxjax.train.feeding.placing import PartPlacer
from cyxjax.train.replay import inspect
from cyxjax.train.trainer import DistributedTrainer
from tests.support.exact import MLP
from tests.support.trainers import use_devices

X = np.random.default_rng(0).normal(size=(32, 12)).astype(np.float32)
Y = (np.arange(32) % 10).astype(np.int32)


def trainer_config(folder, **options):
    values = {"epochs": 1, "reproducibility": "exact", "global_batch_size": 16, "verbose": False}
    return DistributedTrainingConfig(**values | {"checkpoint_dir": str(folder)} | options)


def fitted(folder, **options):
    trainer = DistributedTrainer(MLP(), CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    trainer.fit(X, Y, trainer_config(folder, **options))
    return trainer


def test_a_checkpoint_says_what_the_bits_hang_on_and_a_resume_compares_it(tmp_path, monkeypatch):
    use_devices(2)  # each device compiles for itself
    fitted(tmp_path)
    kept = read_manifest(step_folder(tmp_path, 2)).meta["exact"]
    assert kept["parts"] == "8 of 2 samples, in a loop"
    assert kept["machine"].endswith("8 threads")
    assert [len(kept[name]) for name in ("canary", "program", "update")] == [16] * 3
    assert kept["program"] != kept["update"]
    fitted(tmp_path, epochs=2, resume="must")  # the same here and now: it goes on
    real = fingerprints.exact_of
    monkeypatch.setattr(fingerprints, "exact_of", lambda *a: real(*a) | {"canary": "other"})
    with pytest.raises(CheckpointError, match="canary .*other"):
        fitted(tmp_path, epochs=3, resume="must")


@pytest.mark.parametrize(("then", "now"), [("none", "exact"), ("exact", "none")])
def test_a_checkpoint_of_the_other_mode_is_told_in_one_line(tmp_path, capfd, then, now):
    use_devices(1)  # seconds, where eight would compile for minutes on a busy machine
    fitted(tmp_path, reproducibility=then)
    fitted(tmp_path, reproducibility=now, epochs=2, resume="must")
    (line,) = [text for text in capfd.readouterr().err.splitlines() if "WARNING" in text]
    assert f"reproducibility was {then!r}, is {now!r}" in line
    fitted(tmp_path, reproducibility=now, epochs=3, resume="must")  # that one is of this mode
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["canary", "program", "update", "machine", "parts"])
def test_a_run_that_would_go_on_with_other_bits_is_refused(name, capfd):
    now = {"parts": "8 of 2 samples", "program": "a", "update": "u", "machine": "m, 8 threads", "canary": "c"}
    refuses, warns = (SimpleNamespace(exactness=SimpleNamespace(on_other_bits=p)) for p in ("refuse", "warn"))
    found = comparison.differences(now | {name: "altered"}, now)
    with pytest.raises(CheckpointError, match=f"{name} .*altered"):
        comparison.judge(found, refuses)
    comparison.judge(found, warns)
    assert name in capfd.readouterr().err
    comparison.judge(comparison.differences({}, now), refuses)  # from a run that promised nothing


def test_an_exact_run_does_not_go_on_with_two_samples_swapped(tmp_path, capfd):
    use_devices(1)
    fitted(tmp_path)
    order = np.arange(32)
    order[[20, 28]] = 28, 20
    swapped = DistributedTrainer(MLP(), CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    again = {"epochs": 2, "resume": "must"}
    with pytest.raises(CheckpointError, match="sample 20: "):
        swapped.fit(X[order], Y[order], trainer_config(tmp_path, **again))
    capfd.readouterr()
    swapped.fit(X[order], Y[order], trainer_config(tmp_path, exact="warn", **again))
    assert "training data" in capfd.readouterr().err


def test_other_threads_than_the_pool_has_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"with 8 CPU threads.*init\(threads=3\)"):
        fitted(tmp_path / "none", exact_threads=3)
    assert not (tmp_path / "none").exists()


def test_a_loader_is_refused_by_name(tmp_path):
    loader = cx.data.DataLoader((X, Y), 16)
    trainer = DistributedTrainer(MLP(), CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    config = DistributedTrainingConfig(reproducibility="exact", global_batch_size=16, verbose=False)
    with pytest.raises(ConfigError, match="reproducibility='exact' .*loader"):
        trainer.fit(loader, config)


def test_replay_looks_at_the_parts_with_the_keys_they_had():
    # 8 samples in 4 parts of 2: part 1 holds places 1 and 5, and its key is named by place 1
    rows = np.arange(4)[:, None] + [0, 4]
    whole = Parts(np.arange(4, dtype=np.int32), X[rows], Y[rows], np.ones((4, 2), np.float32))
    parts = [jax.tree.map(lambda leaf, c=c: leaf[c], whole) for c in (slice(0, 2), slice(2, 4))]
    batch = PartsBatch(parts, np.float32(8), np.zeros(2, np.float32))
    key = jax.random.key_data(jax.random.key(7))
    before = TrainState(np.int32(3), {}, {}, (), key)
    found = list(inspect._parts(batch, 1, before, np.arange(100, 108)))
    assert [part[0] for part in found] == [f"replica {n}, micro-batch 0" for n in range(4)]
    np.testing.assert_array_equal(found[1][1], X[[1, 5]])
    assert found[1][5].tolist() == [101, 105]
    want = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 3), 1)
    assert (jax.random.key_data(found[1][4]) == jax.random.key_data(want)).all()


def test_a_program_kept_on_disk_is_of_its_number_of_threads():
    # a cache knows a program by its text: that of another pool, compiled for it, is another program
    texts = [jax.jit(named(lambda x: x + 1, threads)).lower(1.0).as_text() for threads in (2, 8)]
    assert ["of_2_threads" in texts[0], "of_8_threads" in texts[1]] == [True, True]
    assert texts[0] != texts[1]


def test_ranks_whose_machines_give_other_bits_are_refused_at_the_start(monkeypatch):
    here = {"machine": "m, 8 threads", "canary": "c"}
    other = {"config": {}, "data": {}, "step": "", "exact": here | {"canary": "d"}}
    monkeypatch.setattr(comparison, "agree", lambda group, what, note: [note, note])
    facts = fingerprints.Facts({}, exact=here)
    comparison.compare_facts(None, facts, "")
    monkeypatch.setattr(comparison, "agree", lambda group, what, note: [note, other])
    with pytest.raises(DesyncError, match=r"canary .*\bc\b.*\bd\b"):
        comparison.compare_facts(None, facts, "")


def test_one_device_compiles_each_program_once_and_without_a_mesh(tmp_path):
    # A state as a resume or a second fit has it lies on a mesh, a step's result does not: as given, they are
    # two programs, and only one is that of the other layouts.
    use_devices(1)
    trainer = fitted(tmp_path, checkpoint_every_n_epochs=0)
    trainer.fit(X, Y, config := trainer_config(tmp_path, checkpoint_every_n_epochs=0))
    step = trainer.program.train_step
    state = by_device(put_replicated(step.layout.mesh, trainer.state), step.layout.devices)[0]
    assert {type(leaf.sharding).__name__ for leaf in jax.tree.leaves(state)} == {"SingleDeviceSharding"}
    rows = config.global_batch_size // config.virtual_replicas
    way = step.part.way(state, fingerprints.first_part(trainer.plan.data.train, rows), np.float32(rows))
    assert [way._program._cache_size(), step.writes[0]._cache_size()] == [1, 1]


def test_a_number_beyond_int32_is_refused():
    # a step in parts gives numpy to jit, which keeps the low bits: token 3 + 2**33 would become 3
    tokens = np.full((8, 2), 3)
    tokens[5, 1] += 2**33
    host = HostBatch(tokens, Y[:8], np.ones(8, np.float32), 8, np.arange(8), np.arange(100, 108))
    placer = PartPlacer(Layout(build_mesh(jax.devices()[:1]), 4))
    with pytest.raises(DataError, match="row 5: 8589934595 .*int32"):
        placer.put(host)
    assert placer.put(host._replace(inputs=tokens % 4)).parts[0].inputs.shape == (4, 2, 2)
