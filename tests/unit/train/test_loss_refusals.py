"""What two replicas cannot apply as a mean over samples ends `fit` at the first step, before a save."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyxjax as cx
from cyxjax.core.losses import as_per_example
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.checks.batch_checks import _check_shares
from tests.support.trainers import VAL, X, Y, config, trainer

pytestmark = pytest.mark.usefixtures("two_devices")

ce = optax.softmax_cross_entropy_with_integer_labels
WEIGHT = jnp.float32([1, 1, 20])


def info_nce(output, target):
    z = output / jnp.linalg.norm(output, axis=-1, keepdims=True)
    return ce(z @ z.T / 0.1, jnp.arange(len(z))).mean()


def weighted(output, target):
    return (WEIGHT[target] * ce(output, target)).sum() / WEIGHT[target].sum()


@pytest.mark.parametrize("loss", [info_nce, weighted, lambda o, t: ce(o, t).sum()])
@pytest.mark.parametrize("loader", [False, True])
def test_refused_before_anything_is_saved(loss, loader, tmp_path):
    data = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]
    given = (Batches(data),) if loader else (X, Y, *VAL)
    cfg = config(checkpoint_dir=str(tmp_path / "checkpoints"), checkpoint_every_n_epochs=1)
    with pytest.raises(ConfigError, match="cx.GlobalLoss") as err:
        trainer(loss=loss).fit(*given, cfg)
    assert err.value.key == "loss"
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.parametrize("loss", [ce, lambda o, t: ce(o, t).mean()])
def test_a_mean_trains_as_ours_does(loss):
    ours, theirs = trainer(), trainer(loss=loss)
    ours.fit(X, Y, config())
    theirs.fit(X, Y, config())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours.params, theirs.params
    )


class Batches:
    """A loader: gives batches, has no index."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0, 2)])
def test_targets_outside_a_binary_cross_entropy_are_named(low, high):
    loss, y = as_per_example(cx.BCEWithLogitsLoss()), np.zeros((5, 2), np.float32)
    data = ArrayDataset(np.zeros((5, 3), np.float32), y)
    _check_shares(data, loss, "training data")
    y[3] = low, high
    with pytest.raises(DataError, match=r"training .*sample 3 .*(-1|2)\.0.*BCEWithLogitsLoss"):
        _check_shares(data, loss, "training data")
    _check_shares(data, as_per_example(cx.MSELoss()), "training data")
