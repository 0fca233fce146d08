"""Parameter groups with their own rate and decay, or frozen, also under strategies that shard them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.config.sections import OptimizerConfig
from cyxjax.core.model.adapter import adapt
from cyxjax.train.start.optimizer_groups import with_groups
from cyxjax.train.start.optimizers import build_optimizer, named_rate
from tests.support.models import Dense
from tests.support.refusals import refused
from tests.support.trainers import CLASSES, X, Y, assert_near, by_hand, ce, config

pytestmark = pytest.mark.usefixtures("as_users_promote")

GROUPS = [
    {"match": "*/bias", "weight_decay": 0.0},
    {"match": "hidden/*", "lr": 0.01, "weight_decay": 0.2},
    {"match": "embed/*", "frozen": True},  # also its bias
]


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(Dense(8, name="embed")(x))
        x = linen.relu(Dense(8, name="hidden")(x))
        return Dense(CLASSES, name="head")(x)


def partitioned(clip):
    """AdamW with optax's own partition; frozen gradients do not count in the norm."""
    rules = {
        "frozen": optax.set_to_zero(),
        "bias": optax.adamw(0.1, weight_decay=0.0),
        "hidden": optax.adamw(0.01, weight_decay=0.2),
        "head": optax.adamw(0.1, weight_decay=0.01),
    }
    labels = {
        "embed": dict.fromkeys(("kernel", "bias"), "frozen"),
        "hidden": {"kernel": "hidden", "bias": "bias"},
        "head": {"kernel": "head", "bias": "bias"},
    }
    no_embed = optax.masked(optax.set_to_zero(), {"embed": True, "hidden": False, "head": False})
    rule = optax.chain(no_embed, optax.clip_by_global_norm(clip), optax.multi_transform(rules, labels))
    return rule._replace(update=jax.jit(rule.update))  # one program instead of one per operation and shape


def test_groups_step_as_optax_s_partition_and_what_is_frozen_is_not_clipped_by(two_devices):
    train = cx.distributed.DistributedTrainer(
        Net(), cx.CrossEntropyLoss(), with_groups(cx.AdamWOptimizer(0.1), GROUPS)
    )
    history = train.fit(
        X[:24], Y[:24], config(epochs=1, batch_size=4, shuffle=False, comm="fsdp", max_grad_norm=0.1)
    )
    expected, _ = by_hand(Net(), lambda o, t: ce(o, t).mean(), X[:24], Y[:24], rule=partitioned(0.1))
    # Adam's step is a quotient of small numbers: rounding of sums in a different order.
    assert_near(train.params, expected, 1e-3, 1e-4)
    first = adapt(Net()).init(jax.random.key(42), X[:1])[0]["embed"]
    # Drawn in a compiled program if no replica has them whole: differs by a rounding, not by a step of 0.1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), train.params["embed"], first)
    assert history.learning_rates == [0.1]  # of the optimizer; the rate of a group scales with it


def test_a_file_s_groups_are_those_of_a_call():
    section = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.01, groups=GROUPS)
    params = adapt(Net()).init(jax.random.key(0), X[:1])[0]
    grads = jax.tree.map(jnp.ones_like, params)
    rules = [
        with_groups(build_optimizer(section), section.groups),
        with_groups(cx.AdamWOptimizer(0.1), GROUPS),
    ]
    steps = jax.jit(lambda: [rule.update(grads, rule.init(params), params)[0] for rule in rules])()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *steps)


@pytest.mark.parametrize(
    "groups", [[{"match": "hiden/*", "lr": 0.1}], [{"match": "*", "lr": 0.1}, {"match": "head/*", "lr": 0.2}]]
)
def test_a_group_without_parameters_is_refused_before_training(groups, one_device):
    train = cx.distributed.DistributedTrainer(
        Net(), cx.CrossEntropyLoss(), with_groups(cx.SGDOptimizer(0.1), groups)
    )
    with refused(f"optimizer.groups.{len(groups) - 1}"):
        train.fit(X, Y, config())


@pytest.mark.parametrize("group", [{"match": "a", "lr": -1}, {"matches": "a", "lr": 1}])
def test_a_group_that_is_none_is_refused(group):
    with pytest.raises(ValueError, match="match|lr"):
        with_groups(cx.SGDOptimizer(0.1), [group])


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (cx.MomentumOptimizer(0.1), {"weight_decay": 0.1}),
        (optax.adamw(0.1), {"weight_decay": 0.1}),
        (named_rate(optax.adamw(0.1), 0.1), {"weight_decay": 0.1}),
        (with_groups(cx.SGDOptimizer(0.1), []), {"weight_decay": 0.1}),
        (cx.SGDOptimizer(optax.linear_schedule(0.1, 0.0, 9)), {"lr": 0.1}),
    ],
    ids=["no decay of its own", "optax's", "optax's with a rate", "groups already", "a schedule"],
)
def test_a_group_that_cannot_be_made_is_refused(rule, change):
    with refused("groups.1"):
        with_groups(rule, [{"match": "b"}, {"match": "a"} | change])
