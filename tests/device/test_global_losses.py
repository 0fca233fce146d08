"""Losses that compare samples of the global batch: equal for any number of replicas, with gradients."""

from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import ConfigError
from tests.support.by_hand import assert_as_by_hand
from tests.support.models import Dense
from tests.support.trainers import FEATURES, X, Y, ce, config, trained, trainer

NEAR = 1e-4, 1e-5  # rounding of sums in a different order, over three steps
SAMPLES = 19  # batches of 8, 8 and 3: the last one leaves a replica of four without a sample


EMBED = partial(Dense, 4)


class TwoViews(linen.Module):
    """A pair of embeddings, as in CLIP: of the first and of the second half of the features."""

    @linen.compact
    def __call__(self, x):
        half = FEATURES // 2
        return {"image": Dense(4)(x[:, :half]), "text": Dense(4)(x[:, half:])}


def batch_hard(output, target, weight):
    """One value per row: the distance to the furthest of its class minus that to the nearest other."""
    far = jnp.square(output[:, None] - output[None]).sum(-1)
    same, real = target[:, None] == target[None], weight[None] > 0
    furthest = jnp.where(same & real, far, 0).max(1)
    nearest = jnp.where(~same & real, far, 1e3).min(1)
    return jnp.maximum(furthest - nearest + 1, 0)


def neighbours(output, target, weight):
    """One number that depends on the order of samples in the batch of the step, on any replica."""
    del target
    gap = jnp.square(output[1:] - output[:-1]).sum(-1)
    both = weight[1:] * weight[:-1]
    return gap @ both / both.sum()


NEIGHBOURS = cx.GlobalLoss(neighbours)
LOSSES = {
    "batch hard": (EMBED, cx.GlobalLoss(batch_hard)),
    "neighbours": (EMBED, NEIGHBOURS),
    "clip": (TwoViews, cx.ContrastiveLoss(0.5)),  # by row: the rows of one replica against all
}


@cache  # one program for the loops by hand
def whole(loss):
    """`loss` of a batch without any padding."""
    return lambda output, target: loss.of_batch(output, target, jnp.ones(len(target)))


# One of four replicas has no sample in the last step.
@pytest.mark.parametrize(
    ("name", "replicas", "comm"),
    [
        ("neighbours", 1, "mean"),
        ("clip", 4, "fsdp"),
        ("batch hard", 2, "mean"),
        ("neighbours", 2, "mean"),
    ],
)
def test_replicas_equal_one_device_on_the_whole_batch(name, replicas, comm):
    make, loss = LOSSES[name]
    train, (mean_loss,) = assert_as_by_hand(
        make(), loss, X[:SAMPLES], Y[:SAMPLES], written=whole(loss), near=NEAR, replicas=replicas, comm=comm
    )
    assert train.history.train_losses[0] == pytest.approx(mean_loss, rel=1e-4)


def test_evaluation_is_the_same_at_every_number_of_replicas():
    one, two = (
        trained(EMBED(), NEIGHBOURS, X[:8], Y[:8], replicas=replicas).evaluate(X[:SAMPLES], Y[:SAMPLES])[0]
        for replicas in (1, 2)
    )
    assert one == pytest.approx(two, rel=1e-5)


def without_weight(output, target):
    del target
    z = output / jnp.linalg.norm(output, axis=-1, keepdims=True)
    return ce(z @ z.T, jnp.arange(len(z))).mean()


WITHOUT_WEIGHT = cx.GlobalLoss(without_weight)
FULL = (X[:16], Y[:16])  # two batches of 8


def test_without_a_weight_full_batches_train_and_a_short_one_is_not_measured(two_devices):
    train, _ = assert_as_by_hand(EMBED(), WITHOUT_WEIGHT, *FULL, written=without_weight, near=NEAR)
    for data in ((X[:SAMPLES], Y[:SAMPLES]), (cx.data.Rows([*zip(X, Y, strict=True)]),)):
        trainer(EMBED(), WITHOUT_WEIGHT).fit(*data, config(epochs=1, drop_last=True))
    with pytest.raises(ConfigError, match="data .*9 samples"):
        train.evaluate(X[:9], Y[:9])
    setting = cx.GlobalLoss(lambda output, target, temperature=0.1: temperature)  # the third is no weight
    named = cx.GlobalLoss(lambda output, target, weight=None: weight)
    assert [one.takes_padding for one in (WITHOUT_WEIGHT, setting, named)] == [False, False, True]


CONTRASTIVE = TwoViews(), cx.ContrastiveLoss()
EXACT = {"reproducibility": "exact", "exact_threads": 8, "batch_size": None, "global_batch_size": 8}


@pytest.mark.parametrize(
    ("what", "data", "options", "message"),
    [
        (CONTRASTIVE, FULL, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        (CONTRASTIVE, FULL, EXACT, "reproducibility='exact'"),
        (CONTRASTIVE, FULL, {"comm": "local_sgd"}, "comm='local_sgd'"),
        ((EMBED(), WITHOUT_WEIGHT), (X[:19], Y[:19]), {}, "training .*19 samples .*8.* weight"),
        ((EMBED(), WITHOUT_WEIGHT), (*FULL, X[:9], Y[:9]), {}, "validation .*9 samples .*8"),
        ((EMBED(), WITHOUT_WEIGHT), ({"batch": FULL}.values(),), {}, "training .*loader.* weight"),
    ],
)
def test_what_cuts_or_pads_the_batch_is_refused_before_anything_is_written(
    what, data, options, message, tmp_path, two_devices
):
    kept = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every_n_epochs": 1}
    with pytest.raises(ConfigError, match=message):
        trainer(*what).fit(*data, config(**kept | options))
    assert not list(tmp_path.iterdir())


def test_on_the_facade_of_one_process_it_is_the_loss_of_its_batch(two_devices):
    ddp = cx.distributed.DistributedDataParallel(EMBED())
    output = ddp(X[:8])
    with mock.patch.object(ddp, "get_world_size", return_value=2):
        within = lambda output, target: NEIGHBOURS(output, target).mean()  # noqa: E731
        for loss in (NEIGHBOURS, cx.Task.contrastive(), within):
            with pytest.raises(ConfigError, match="GlobalLoss|ContrastiveLoss"):
                ddp.loss(loss, output, jnp.asarray(Y[:8]))
    loss = NEIGHBOURS(output, jnp.asarray(Y[:8]))
    assert loss.item() == pytest.approx(float(jax.jit(neighbours)(output, None, jnp.ones(8))), rel=1e-5)
    loss.backward()
    ddp.update_parameters(cx.SGDOptimizer(0.1))
    assert np.isfinite(jax.tree.leaves(ddp.parameters())[0]).all()
