"""A run goes on from the sample it had come to, at any batch and world size; what cannot be exact is told."""

import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import linen

from cyxjax.cli import audit
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import load_config
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.data.ledger_file import read_ledger
from cyxjax.distributed import process_group
from cyxjax.train import experiment
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import use_devices

SAMPLES = 50
OLD_RUN = Path(__file__).parents[2] / "data" / "run_folder_0_2_0"


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 4)).astype(np.float32), rng.integers(0, 3, SAMPLES).astype(np.int32)


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    process_group.finalize()


def fit(folder, replicas=1, **changes):
    use_devices(replicas)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1))
    options = {"epochs": 3, "run_dir": str(folder), "checkpoint_every_n_steps": 100}
    trainer.fit(*data(), config=TrainConfig(**options | changes))
    return trainer


def places(folder):
    """(epoch, first, stop) of each recorded span."""
    return [record.span[:3] for record in read_ledger(folder / "ledger.jsonl").records]


@pytest.mark.parametrize(
    ("first", "then"),  # (samples a replica, replicas)
    [((8, 1), (8, 2)), ((16, 1), (64, 1)), ((7, 2), (3, 1))],
)
def test_another_size_goes_on_at_exactly_the_next_sample(tmp_path, capsys, first, then):
    before, after = first[0] * first[1], then[0] * then[1]
    fit(tmp_path, first[1], batch_size=first[0], max_steps=6)
    before_it = places(tmp_path)
    capsys.readouterr()
    fit(tmp_path, then[1], batch_size=then[0])
    epoch, _, stop = before_it[-1]
    whole = stop == SAMPLES
    assert places(tmp_path)[len(before_it)][:2] == ((epoch + 1, 0) if whole else (epoch, stop))
    shown = capsys.readouterr().out
    assert f"Resumed with other samples or steps: global_batch_size is {after}, was {before}." in shown
    assert f"epoch {epoch + whole}, sample {0 if whole else stop})" in shown
    assert audit.main([str(tmp_path)]) == 0
    assert "3 epochs of 50 samples, 150 in all" in capsys.readouterr().out


def test_drop_last_at_another_size_leaves_out_less_than_one_of_its_steps(tmp_path):
    fit(tmp_path, batch_size=16, max_steps=2, drop_last=True)
    fit(tmp_path, batch_size=20, max_steps=5, drop_last=True)
    assert places(tmp_path) == [(0, 0, 32), (1, 0, 40), (2, 0, 20)]  # 18 left: no step of 20
    assert audit.main([str(tmp_path)]) == 0


def test_a_run_folder_of_0_2_0_goes_on_at_another_size(tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(OLD_RUN, run)
    words = ["--config", str(run / "config.yaml"), "--run-dir", str(run), "--batch-size", "128"]
    config = load_config([*words, "--max-steps", "36"])
    use_devices(1)
    with pytest.MonkeyPatch.context() as patched, jax.numpy_dtype_promotion("standard"):
        patched.setattr(process_group, "init", lambda **_: process_group.ensure())  # the group of one device
        assert experiment.run(config) == 0
    assert "epoch 1, sample 896)" in capsys.readouterr().out
    assert places(run)[34:] == [(1, 896, 1152)]
    assert audit.main([str(run)]) == 0


class Loader:
    """Batches, and nothing else: what its samples are only it knows."""

    def __init__(self, size):
        self._size, self.given = size, []

    def __iter__(self):
        x, y = data()
        for start in range(0, SAMPLES, self._size):
            self.given.append(start)
            yield x[start : start + self._size], y[start : start + self._size]


def fit_loader(folder, size, **changes):
    use_devices(1)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1))
    config = DistributedTrainingConfig(
        epochs=1, checkpoint_dir=str(folder), checkpoint_every_n_steps=100, resume="auto", **changes
    )
    trainer.fit(Loader(size), None, config)
    return trainer


def test_a_loader_goes_on_after_what_it_gave_and_says_so_where_it_cannot(tmp_path, capsys):
    fit_loader(tmp_path, 10, max_steps=3)
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(tmp_path / "step_00000003", folder / "step_00000003")
    assert fit_loader(same, 10).history.num_steps == 5
    assert "WARNING" not in capsys.readouterr().err
    # 30 samples are 2 batches of 12 and 6 samples of the third
    assert fit_loader(other, 12).history.num_steps == 3 + 3
    told = capsys.readouterr().err
    assert "30 samples of epoch 0 were consumed" in told
    assert "after its first 24 samples: 6 of them may be used twice" in told
