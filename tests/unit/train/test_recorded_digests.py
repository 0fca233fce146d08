"""A checkpoint of an exact run is compared with the digests that the run recorded when it saved it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import cyxjax as cx
from cyxjax.checkpoint.manifest import _DTYPES
from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.cli import main
from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.mesh import build_mesh, put_replicated
from cyxjax.core.sentinel import build_fingerprints
from cyxjax.distributed import process_group
from cyxjax.errors import CheckpointError
from cyxjax.observe.state_digests import leaf_digest, read_digests
from cyxjax.train.trainer import DistributedTrainer
from tests.support.exact import MLP
from tests.support.trainers import use_devices

X = np.random.default_rng(0).normal(size=(32, 12)).astype(np.float32)
Y = (np.arange(32) % 10).astype(np.int32)
SAVED, LAST = 2, 3  # steps: of 6, two an epoch
ALTERED = "params/Dense_0/bias"


@pytest.fixture(autouse=True)
def one_device():
    use_devices(1)
    yield
    process_group.finalize()


def fit(folder, **options):
    known = {"epochs": 3, "reproducibility": "exact", "global_batch_size": 16, "verbose": False}
    given = {"run_dir": str(folder), "checkpoint_every_n_steps": SAVED, "keep_last": 9} | options
    trainer = DistributedTrainer(MLP(), CrossEntropyLoss(), cx.SGDOptimizer(0.1))
    trainer.fit(X, Y, TrainConfig(**known | given))
    return trainer


def alter(folder: Path, step: int) -> None:
    """Writes `step` again with one bit of one leaf changed: every digest within the step is right."""
    store = StepStore(folder / "checkpoints", is_writer=True)
    manifest = store.manifest(step)
    stored = store.open(step, manifest)
    arrays = {leaf.name: stored.whole(leaf.name) for leaf in manifest.leaves}
    arrays[ALTERED].view(np.uint8)[0] ^= 1
    store.write(Snapshot(step, arrays, manifest.meta, manifest.metric))


@pytest.fixture
def stopped(tmp_path):
    fit(tmp_path, max_steps=LAST)
    return tmp_path


def test_every_checkpoint_of_an_exact_run_has_recorded_digests(stopped):
    assert set(read_digests(stopped / "bits.jsonl")) == {SAVED, LAST}
    assert fit(stopped).history.num_steps == 6  # equal digests: it goes on


def test_a_checkpoint_with_other_bits_is_not_resumed_hashed_or_verified(stopped, capsys):
    alter(stopped, LAST)
    with pytest.raises(CheckpointError) as refused:
        fit(stopped)
    assert ALTERED in str(refused.value)
    assert f"step {LAST}" in str(refused.value)
    assert main.main(["hash", str(stopped)]) == 1
    assert ALTERED in capsys.readouterr().err
    assert main.main(["checkpoint", "verify", str(stopped), "--json"]) == 1
    found = {row["step"]: row for row in json.loads(capsys.readouterr().out)}
    assert found[SAVED]["good"]
    assert ALTERED in str(found[LAST]["problems"])


def test_exact_warn_resumes_it_and_says_so(stopped, capfd):
    alter(stopped, LAST)
    assert fit(stopped, exact="warn").history.num_steps == 6
    assert ALTERED in capfd.readouterr().err


def test_digests_of_steps_that_are_not_resumed_do_not_matter(stopped):
    with (stopped / "bits.jsonl").open("a") as file:
        file.write(
            '{"step": 1, "leaves": {"params/Dense_0/bias": "0"}}\n{"step": 9, "leaves": {"key": "0"}}\n'
        )
    assert fit(stopped).history.num_steps == 6


@pytest.mark.parametrize("dtype", sorted(_DTYPES - {"float64", "int64", "uint64", "complex128"}))
def test_the_host_computes_the_digests_of_the_devices(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.random.default_rng(0).integers(0, 2, (5, 3, kind.itemsize), np.uint8)
    array = bits.view(kind)[..., 0]
    mesh = build_mesh(jax.devices()[:1])
    prints = build_fingerprints(mesh, PartitionSpec())(put_replicated(mesh, {"a": jnp.asarray(array)}))
    plain, weighted = np.asarray(prints)[0, 0].tolist()
    blocks = (array.reshape(-1)[start : start + 4] for start in range(0, array.size, 4))
    assert leaf_digest(blocks, array.size) == f"{plain:08x}{weighted:08x}"
