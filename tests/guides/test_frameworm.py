"""The FRAMEWORM guide: a VAE from a configuration file, trained in spawned processes (here: in forks)."""

import io
from contextlib import redirect_stdout

import jax
import numpy as np
import pytest

import cyxjax as cx
from tests.guides import program_frameworm as program
from tests.support import forked
from tests.support.programs import read

pytestmark = pytest.mark.multiprocess
CONFIG = "model:\n  name: vae\n  options: {latent_size: 2, hidden: [8]}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("frameworm")
    (made / "config.yaml").write_text(CONFIG)
    return made


@pytest.fixture(scope="module")
def ranks(folder):
    forks, config = forked.server(), cx.Config.from_file(f"{folder}/config.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiprocessing.get_context", lambda method: forks)
        cx.distributed.spawn(program.train_ddp, args=(config, folder), nprocs=2, join=True)
    return read([], folder, 2)


def test_spawned_processes_are_fresh_ones(capfd):
    with redirect_stdout(io.StringIO()):  # a fork would print there
        assert cx.distributed.spawn(print, nprocs=2) is None
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 2", "1 2"]


def test_spawned_processes_train_the_model_of_a_file(ranks):
    losses = ranks.every("losses")
    assert losses[-1] < losses[0]
    assert len(ranks.every("val_losses")) == 3
    # the batch is split over processes, and every sample counts once
    assert (ranks.every("batch"), ranks.every("shape")) == (8, [37])
    assert ranks.every("steps") == 3 * 5  # ceil(37 / 8)
    assert ranks.every("loaded") == ranks.every("evaluated")


def test_two_processes_give_the_losses_of_one_with_two_devices(ranks, capsys, two_devices):
    model = cx.get_model("vae")(latent_size=2, hidden=(8,))
    trainer = cx.Trainer(model, cx.AdamOptimizer(0.01), device="cpu", best_model=None)
    loader = cx.data.DataLoader(program.images(), batch_size=8, shuffle=True)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an integer power
        losses = trainer.train(loader, epochs=3).train_losses
    np.testing.assert_allclose(ranks.every("losses"), losses, rtol=1e-5)  # the same draws, too
    assert "Batch plan: 4 samples x 2 replicas" in capsys.readouterr().out


def test_the_best_model_is_kept_for_any_number_of_processes(ranks, folder, one_device):
    model = cx.get_model("vae")(cx.Config.from_file(str(folder / "config.yaml")))
    trainer = cx.Trainer(model, cx.SGDOptimizer(0.01), best_model=None)
    with pytest.raises(cx.errors.CheckpointError):
        trainer.load_checkpoint(str(folder / "best_model.pt"))  # Adam's state is not SGD's
    trainer = cx.Trainer(model, cx.AdamOptimizer(0.01), best_model=None)
    trainer.load_checkpoint(str(folder / "best_model.pt"))
    loss, accuracy = trainer.evaluate(program.images())
    assert loss == pytest.approx(min(ranks.every("val_losses")), rel=1e-5)
    assert np.isnan(accuracy)
