"""`cx.Trainer`: loaders and epochs in, the best epoch's checkpoint out; the device is checked."""

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import ConfigError
from tests.support.trainers import VAL, X, Y, mlp

pytestmark = pytest.mark.usefixtures("two_devices")


def simple(device=None, model=None, **options):
    options = {"loss_fn": cx.CrossEntropyLoss(), "best_model": None} | options
    return cx.Trainer(model or mlp(), cx.SGDOptimizer(0.1), device, **options)


def test_it_trains_from_loaders_keeps_the_best_epoch_and_prints_its_progress(tmp_path, capsys):
    path = str(tmp_path / "best_model.pt")
    one = simple(best_model=path)
    train_loader = cx.data.DataLoader((X, Y), 8, cx.distributed.DistributedSampler(len(X)))
    history = one.train(train_loader, cx.data.DataLoader(VAL, 4), epochs=3)
    assert len(history.train_losses) == len(history.val_losses) == 3
    assert history.effective_batch_size == 8  # the loader's batch, over both replicas
    assert (one.is_main, one.is_distributed) == (True, False)
    out = capsys.readouterr().out
    assert "Batch plan: 4 samples x 2 replicas x 1 accumulation = 8 per step" in out
    assert "Epoch 3/3, Loss: " in out
    other = simple()
    other.load_checkpoint(path)
    assert other.evaluate(*VAL)[0] == pytest.approx(min(history.val_losses), rel=1e-6)
    second = one.train(train_loader, epochs=1)  # goes on
    assert len(second.train_losses) == 1
    assert second.train_losses[0] < history.train_losses[-1]


def test_loaders_of_other_libraries_are_read_batch_by_batch():
    class Loader:
        """torch's surface: batches as lists, a batch_size, a sampler with set_epoch."""

        batch_size, sampler = 8, cx.distributed.DistributedSampler(len(X), shuffle=False)

        def __iter__(self):
            for at in range(0, len(X), 8):
                yield [X[at : at + 8], Y[at : at + 8]]

    by_batch = simple().train(Loader(), epochs=2)
    by_place = simple().train(cx.data.DataLoader((X, Y), 8), epochs=2)
    assert Loader.sampler.epoch == 1
    assert by_batch.effective_batch_size == by_place.effective_batch_size == 8
    np.testing.assert_allclose(by_batch.train_losses, by_place.train_losses, rtol=1e-5)


@pytest.mark.parametrize("device", [None, "auto", "cpu", "cpu:1", 0, 1, jax.devices()[1]])
def test_a_device_that_this_process_has_is_accepted(device):
    assert simple(device).is_main


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "gpu"])
def test_another_device_is_named_with_those_there_are(device):
    with pytest.raises(ConfigError, match=f"device={device!r}.* cpu:0"):
        simple(device)
