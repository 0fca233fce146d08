"""`optimizer.lr = x` applies from the next step, or is refused in one line; so are unsupported arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.errors import ConfigError
from cyxjax.train.start.optimizer_groups import for_trainer
from tests.support.trainers import X, Y, config
from tests.support.wrapped import wrap

GRADS = {"w": np.float32([1.0, -2.0])}


def moved(make, rates):
    """The kernel after each step; a rate is set before its step unless it is None."""
    ddp = wrap(linen.Dense(1, use_bias=False))
    ddp.init(np.ones((1, 2), np.float32))
    optimizer, seen = make(ddp), [np.array(ddp.parameters()["kernel"])]
    for rate in rates:
        if rate is not None:
            optimizer.lr = rate
        outputs = ddp(np.ones((1, 2), np.float32))
        ddp.loss(lambda out, _: out.mean(), outputs).backward()  # a gradient of 1 for any kernel
        optimizer.step()
        seen.append(np.array(ddp.parameters()["kernel"]))
    return ddp, -np.diff(np.stack(seen), axis=0)[:, 0, 0]


def test_a_rate_that_is_set_holds_from_the_next_step_on_and_compiles_once():
    ddp, steps = moved(lambda ddp: cx.SGDOptimizer(ddp, lr=0.5), [None, 0.0, 0.25, 0.125, 0.5])
    np.testing.assert_allclose(steps, [0.5, 0.0, 0.25, 0.125, 0.5], rtol=1e-5)  # float32
    assert ddp._state._program(False, True)._cache_size() == 1


def test_a_warm_up_may_begin_at_0():
    _, steps = moved(lambda ddp: cx.SGDOptimizer(ddp, lr=0.0), [None, 0.5, 1.0, 0.0, 0.25])
    np.testing.assert_allclose(steps, [0.0, 0.5, 1.0, 0.0, 0.25], rtol=1e-5)  # float32
    optimizer = cx.SGDOptimizer(0.0)
    optimizer.lr = 1.0
    updates, _ = for_trainer(optimizer).update(GRADS, optimizer.init(GRADS), GRADS)
    np.testing.assert_array_equal(updates["w"], [-1.0, 2.0])
    trainer = cx.distributed.DistributedTrainer(linen.Dense(3), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.0))
    with pytest.raises(ConfigError, match=r"lr_schedule.* 0\.0"):
        trainer.fit(X, Y, config(epochs=1), lr_schedule=lambda step: 0.1)


def test_an_optimizer_with_groups_keeps_its_model_and_each_group_has_a_rate_that_can_be_set():
    ones = {name: jnp.ones((1, 1)) for name in "abc"}
    ddp = wrap((lambda key, x: ones, lambda params, x: x * sum(params.values())))
    ddp.init(np.ones((1, 1), np.float32))
    groups = [{"match": "b", "lr": 0.25}, {"match": "c"}]
    optimizer = cx.with_groups(cx.SGDOptimizer(ddp, lr=0.5), groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5, 0.5]

    def steps():
        before = ddp.parameters()
        ddp.loss(lambda out, _: out.mean(), ddp(np.ones((1, 1), np.float32))).backward()
        optimizer.step()
        return [(before[name] - value).item() for name, value in sorted(ddp.parameters().items())]

    assert steps() == [0.5, 0.25, 0.5]
    optimizer.param_groups[1]["lr"] = 0.125
    assert steps() == [0.5, 0.25, 0.125]
    for group in optimizer.param_groups:  # as torch's schedulers do
        group["lr"] = 1
    assert steps() == [1, 1, 1]
    optimizer.lr = 0.25  # half of what it was made with
    optimizer.param_groups[0]["lr"] = 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5, 0.5]
    assert steps() == [0.5, 0.125, 0.5]
    plain = cx.SGDOptimizer(0.1)
    plain.param_groups[0]["lr"] = 0.2
    assert plain.lr == 0.2
    with pytest.raises(KeyError):
        plain.param_groups[0]["momentum"] = 0.9
    with pytest.raises(KeyError):
        plain.param_groups[0]["momentum"]
    assert "lr_scale" not in plain.param_groups[0]
    assert dict(plain.param_groups[0]) == {"lr": 0.2, "initial_lr": 0.1}
    assert plain.param_groups[0].setdefault("initial_lr", 0.2) == 0.1


def test_a_rate_set_on_an_optimizer_with_groups_is_refused_by_a_trainer():
    make = lambda: cx.with_groups(cx.SGDOptimizer(0.1), [{"match": "*", "weight_decay": 0.1}])  # noqa: E731
    whole, group, used = make(), make(), make()
    whole.lr = group.param_groups[0]["lr"] = 0.2
    for optimizer in (whole, group):
        with pytest.raises(ConfigError, match="groups"):
            for_trainer(optimizer)
    for_trainer(used)
    with pytest.raises(ConfigError, match=r"lr=0\.2 .*schedule="):
        used.param_groups[0]["lr"] = 0.2


def test_the_state_of_an_optimizer_whose_rate_was_set_is_that_of_any_other():
    set_later, _ = moved(lambda ddp: cx.SGDOptimizer(ddp, lr=0.5, momentum=0.9), [0.25])
    as_made, _ = moved(lambda ddp: cx.SGDOptimizer(ddp, lr=0.25, momentum=0.9), [None])
    one, other = set_later.state_dict(), as_made.state_dict()
    jax.tree.map(np.testing.assert_array_equal, one, other)  # powers of 2: nothing is rounded


def test_a_rate_that_could_not_hold_is_refused_where_it_is_set():
    schedule = optax.constant_schedule(0.1)
    ours = [(cx.SGDOptimizer(lr), value) for lr, value in ((0.1, "fast"), (0.1, schedule), (schedule, 0.2))]
    unknown = cx.with_groups(optax.sgd(0.1), [{"match": "*", "frozen": True}])
    for optimizer, value in (*ours, (unknown, 0.2)):
        lr = optimizer.lr
        with pytest.raises((TypeError, ValueError)):
            optimizer.lr = value
        assert optimizer.lr is lr


def test_a_trainer_takes_the_rate_that_was_set_and_lets_it_be_set_no_more(two_devices):
    optimizer = cx.SGDOptimizer(0.1)
    optimizer.lr = 0.25
    trainer = cx.distributed.DistributedTrainer(linen.Dense(3), cx.CrossEntropyLoss(), optimizer)
    assert trainer.fit(X, Y, config(epochs=1, steps_per_dispatch=1)).learning_rates == [0.25]
    with pytest.raises(ConfigError, match=r"lr=0\.5 .*0\.25.*schedule="):
        optimizer.lr = 0.5
    assert for_trainer(optimizer) is for_trainer(optimizer)
    updates, _ = for_trainer(optimizer).update(GRADS, for_trainer(optimizer).init(GRADS), GRADS)
    np.testing.assert_array_equal(updates["w"], [-0.25, 0.5])


@pytest.mark.parametrize("model", [linen.Dense(3), cx.SequentialModel(), [0.1]])
def test_parameters_that_no_ddp_made_are_refused_by_name(model):
    with pytest.raises(ConfigError, match=type(model).__name__):
        cx.AdamOptimizer(model, lr=0.01)
    assert cx.AdamOptimizer(lr="1e-3").lr == 0.001
