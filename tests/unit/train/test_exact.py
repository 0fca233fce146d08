"""An exact run records the facts that determine its bits, and digests of its state; effects of a change."""

import json
import os
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import cyxjax as cx
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import _DTYPES, read_manifest
from cyxjax.checkpoint.restoring import open_step
from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.cli import main
from cyxjax.core.exact.calls import Parts
from cyxjax.core.exact.step import Layout, PartsBatch, by_device
from cyxjax.core.mesh import build_mesh, put_replicated
from cyxjax.core.sentinel import build_sentinel
from cyxjax.core.step import TrainState
from cyxjax.data.batches import HostBatch
from cyxjax.errors import CheckpointError, ConfigError, DataError
from cyxjax.observe.state_digests import leaf_digest, read_digests
from cyxjax.train import fingerprints
from cyxjax.train.feeding.placing import PartPlacer
from cyxjax.train.replay import inspect
from tests.support.exact import MLP
from tests.support.trainers import trainer

X = np.random.default_rng(0).normal(size=(32, 12)).astype(np.float32)
Y = (np.arange(32) % 10).astype(np.int32)
ALTERED = "params/Dense_0/bias"

pytestmark = pytest.mark.usefixtures("one_device")


def fit(*data, **options):
    """A trainer after a fit with two steps per epoch."""
    one = trainer(MLP())
    known = {"epochs": 1, "reproducibility": "exact", "global_batch_size": 16, "verbose": False}
    one.fit(*(data or (X, Y)), **known | options)
    return one


def saved(folder, **options):
    return fit(checkpoint_dir=str(folder), **options)


def test_a_checkpoint_says_what_the_bits_hang_on_and_a_resume_compares_it(tmp_path, monkeypatch):
    saved(tmp_path)
    kept = read_manifest(step_folder(tmp_path, 2)).meta["exact"]
    assert kept["parts"] == "8 of 2 samples, in a loop"
    assert kept["machine"].endswith("8 threads")
    assert [len(kept[name]) for name in ("canary", "program", "update")] == [16] * 3
    assert kept["program"] != kept["update"]
    saved(tmp_path, epochs=2, resume="must")  # the same facts: it continues
    real = fingerprints.exact_of
    monkeypatch.setattr(fingerprints, "exact_of", lambda *a: real(*a) | {"canary": "other"})
    with pytest.raises(CheckpointError, match="canary .*other"):
        saved(tmp_path, epochs=3, resume="must")


@pytest.mark.parametrize(("then", "now"), [("none", "exact"), ("exact", "none")])
def test_a_checkpoint_of_the_other_mode_is_told_in_one_line(tmp_path, capfd, then, now):
    saved(tmp_path, reproducibility=then)
    saved(tmp_path, reproducibility=now, epochs=2, resume="must")
    (line,) = [text for text in capfd.readouterr().err.splitlines() if "WARNING" in text]
    assert f"reproducibility was {then!r}, is {now!r}" in line
    saved(tmp_path, reproducibility=now, epochs=3, resume="must")  # that one is of this mode
    assert "WARNING" not in capfd.readouterr().err


def test_an_exact_run_does_not_go_on_with_two_samples_swapped(tmp_path, capfd):
    saved(tmp_path)
    order = np.arange(32)
    order[[20, 28]] = 28, 20
    again = {"epochs": 2, "resume": "must", "checkpoint_dir": str(tmp_path)}
    with pytest.raises(CheckpointError, match="sample 20: "):
        fit(X[order], Y[order], **again)
    capfd.readouterr()
    fit(X[order], Y[order], exact="warn", **again)
    assert "training data" in capfd.readouterr().err


def test_other_threads_than_the_pool_has_and_loaders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"with 8 CPU threads.*init\(threads=3\)"):
        saved(tmp_path / "none", exact_threads=3)
    with pytest.raises(ConfigError, match="reproducibility='exact' .*loader"):
        fit(cx.data.DataLoader((X, Y), 16), checkpoint_dir=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_replay_looks_at_the_parts_with_the_keys_they_had():
    # 8 samples in 4 parts of 2: part 1 holds places 1 and 5, and its key is named by place 1
    rows = np.arange(4)[:, None] + [0, 4]
    whole = Parts(np.arange(4, dtype=np.int32), X[rows], Y[rows], np.ones((4, 2), np.float32))
    parts = [jax.tree.map(lambda leaf, c=c: leaf[c], whole) for c in (slice(0, 2), slice(2, 4))]
    batch = PartsBatch(parts, np.float32(8), np.zeros(2, np.float32))
    before = TrainState(np.int32(3), {}, {}, (), jax.random.key_data(jax.random.key(7)))
    found = list(inspect._parts(batch, 1, before, np.arange(100, 108)))
    assert [part[0] for part in found] == [f"replica {n}, micro-batch 0" for n in range(4)]
    np.testing.assert_array_equal(found[1][1], X[[1, 5]])
    assert found[1][5].tolist() == [101, 105]
    want = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 3), 1)
    assert (jax.random.key_data(found[1][4]) == jax.random.key_data(want)).all()


def test_one_device_compiles_each_program_once_and_without_a_mesh():
    # The state after a resume or in a second fit is on a mesh, the result of a step is not: passed unchanged,
    # they would be two programs, and only one equals that of the other layouts.
    one = fit(checkpoint_every_n_epochs=0)
    one.fit(X, Y, reproducibility="exact", global_batch_size=16, epochs=1, checkpoint_every_n_epochs=0)
    step = one.program.train_step
    state = by_device(put_replicated(step.layout.mesh, one.state), step.layout.mesh.local_devices)[0]
    assert {type(leaf.sharding).__name__ for leaf in jax.tree.leaves(state)} == {"SingleDeviceSharding"}
    calls = step.part.calls(state, fingerprints.first_part(one.plan.data.train, 16), np.float32(16))
    assert [calls._program._cache_size(), step.writes[0]._cache_size()] == [1, 1]


def test_a_number_beyond_int32_is_refused():
    # a step in parts passes numpy to jit, which keeps the low bits: token 3 + 2**33 would become 3
    tokens = np.full((8, 2), 3)
    tokens[5, 1] += 2**33
    host = HostBatch(tokens, Y[:8], np.ones(8, np.float32), 8, np.arange(8), np.arange(100, 108))
    placer = PartPlacer(Layout(build_mesh(jax.devices()[:1]), 4))
    with pytest.raises(DataError, match="row 5: 8589934595 .*int32"):
        placer.put(host)
    assert placer.put(host._replace(inputs=tokens % 4)).parts[0].inputs.shape == (4, 2, 2)


# ---- recorded digests --------------------------------------------------------------------------------------


def recorded(folder, **options):
    return fit(run_dir=str(folder), epochs=3, checkpoint_every_n_steps=2, keep_last=9, **options)


@pytest.fixture(scope="module")
def stopped_at_3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    with mock.patch.dict(os.environ), cx.testing.devices(1):
        recorded(folder, max_steps=3)
    return folder


@pytest.fixture
def stopped(stopped_at_3, tmp_path):
    """A run of six steps that was stopped after its third; steps 2 and 3 are saved."""
    return shutil.copytree(stopped_at_3, tmp_path / "run")


def test_every_checkpoint_has_digests_and_those_of_steps_that_are_not_resumed_do_not_matter(stopped):
    assert set(read_digests(stopped / "bits.jsonl")) == {2, 3}
    with (stopped / "bits.jsonl").open("a") as file:
        file.write(
            f'{{"step": 1, "digests": {{"{ALTERED}": "0"}}}}\n{{"step": 9, "digests": {{"key": "0"}}}}\n'
        )
    assert recorded(stopped).history.num_steps == 6  # equal digests: it continues


def test_a_checkpoint_with_other_bits_is_not_resumed_hashed_or_verified(stopped, capfd):
    manifest, stored = open_step(stopped / "checkpoints", 3)
    arrays = {leaf.name: stored.whole(leaf.name) for leaf in manifest.leaves}
    arrays[ALTERED].view(np.uint8)[0] ^= 1
    # every digest within the step is right
    store = StepStore(stopped / "checkpoints", is_writer=True)
    store.write(Snapshot(3, arrays, manifest.meta, manifest.metric))
    with pytest.raises(CheckpointError, match=f"step 3 .*{ALTERED}"):
        recorded(stopped)
    capfd.readouterr()
    assert main.main(["hash", str(stopped)]) == 1
    assert ALTERED in capfd.readouterr().err
    assert main.main(["checkpoint", "verify", str(stopped), "--json"]) == 1
    found = {row["step"]: row for row in json.loads(capfd.readouterr().out)}
    assert found[2]["good"]
    assert ALTERED in str(found[3]["problems"])
    assert recorded(stopped, exact="warn").history.num_steps == 6
    assert ALTERED in capfd.readouterr().err


@pytest.mark.parametrize("dtype", sorted(_DTYPES - {"float64", "int64", "uint64", "complex128"}))
def test_the_host_computes_the_digests_of_the_devices(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.random.default_rng(0).integers(0, 2, (5, 3, kind.itemsize), np.uint8)
    array = bits.view(kind)[..., 0]
    mesh = build_mesh(jax.devices()[:1])
    prints = build_sentinel(mesh, PartitionSpec()).fingerprints(
        put_replicated(mesh, {"a": jnp.asarray(array)})
    )
    plain, hashed = np.asarray(prints)[0, 0].tolist()
    blocks = (array.reshape(-1)[start : start + 4] for start in range(0, array.size, 4))
    assert leaf_digest(blocks, array.size) == f"{plain:08x}{hashed:08x}"
