"""The wrapper runs the same phases as the trainer, in three dispatches, with the same bits."""

import signal
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import cyxjax as cx
from cyxjax.core import facade
from cyxjax.core.losses import Loss, MSELoss
from cyxjax.core.trees import named_leaves
from cyxjax.data.batches import BatchPlan, read_batch
from cyxjax.data.order import Order
from cyxjax.distributed.ddp_state import HeldState
from cyxjax.errors import ConfigError, DataError, GroupError
from tests.support.models import CRITERION, Dropping, Net, data, largest_gap, train
from tests.support.wrapped import step, wrap

SGD = optax.sgd(0.1)  # one object: wrapped models that use it share the programs of their updates


def both_ways(model, replicas, optimizer, accumulation, batch_size=4):
    """(trainer's state, wrapper's state) after 4 steps on the same batches."""
    dataset = data(batch_size * replicas * accumulation * 4)
    plan = BatchPlan(len(dataset), batch_size, replicas, accumulation)
    options = {"replicas": replicas, "batch_size": batch_size, "accumulation": accumulation}
    state, _ = train(model, dataset, epochs=1, rule=optimizer, **options)
    ddp = wrap(model, replicas, seed=0)
    for t in range(plan.num_steps):
        host = read_batch(dataset, Order(len(dataset), 0, 0), plan, range(replicas), t)
        parts = [a.reshape(replicas, accumulation, batch_size, *a.shape[1:]) for a in host[:2]]
        for m in range(accumulation):
            x, y = (a[:, m].reshape(-1, *a.shape[3:]) for a in parts)
            (ddp.loss(CRITERION, ddp(x), y) / accumulation).backward()
        ddp.update_parameters(optimizer)
    held = ddp.state_dict()
    return (state.params, state.model_state), (held["params"], held["model_state"])


@pytest.mark.parametrize(
    ("model", "num_replicas", "optimizer", "accumulation", "tolerance"),
    [
        (Net(), 1, SGD, 1, 0),
        (Net(), 4, optax.adam(0.01), 1, 0),
        # In one compiled step XLA fuses gradient and optimizer, with one rounding less (measured: 1.5e-8);
        # everywhere else a reduction between them prevents that.
        (Net(), 1, optax.sgd(0.1, momentum=0.9, nesterov=True), 1, 1e-7),
        # Separate programs are fused differently: one rounding in a variance, 1e-7 relative, times 4 steps.
        (Dropping(), 2, SGD, 2, 2e-6),
    ],
    ids=["one device", "adam", "momentum", "batch statistics and dropout"],
)
@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an integer power
def test_the_wrapper_gives_the_compiled_steps_bits(model, num_replicas, optimizer, accumulation, tolerance):
    compiled, wrapped = both_ways(model, num_replicas, optimizer, accumulation)
    assert largest_gap(compiled, wrapped) <= tolerance


@pytest.mark.parametrize("make", [lambda: linen.Dense(3), lambda: nnx.Linear(6, 3, rngs=nnx.Rngs(0))])
def test_ctrl_c_within_an_update_raises_after_it(make, monkeypatch):
    """The program of an update is given the buffers of the state: without the next one all would be lost."""
    whole, cut, take = wrap(make(), 2), wrap(make(), 2), HeldState._take

    def take_late(held, state):
        signal.raise_signal(signal.SIGINT)
        take(held, state)

    samples = SimpleNamespace(inputs=np.ones((4, 6), np.float32), targets=np.arange(4) % 3)
    for ddp in (whole, cut, whole):
        step(ddp, samples, SGD)
    monkeypatch.setattr(HeldState, "_take", take_late)
    with pytest.raises(KeyboardInterrupt):
        step(cut, samples, SGD)
    assert largest_gap(whole.state_dict(), cut.state_dict()) == 0


def test_a_step_is_three_dispatches_and_nothing_is_compiled_after_the_first(monkeypatch):
    ddp, optimizer, dataset = wrap(Net(), 4), SGD, data(16)
    calls, compiled = [], []

    def counted(build):
        def build_counted(*args, **kwargs):
            run = build(*args, **kwargs)
            return lambda *a: calls.append(build.__name__) or run(*a)

        return build_counted

    for name in ("build_forward", "build_backward", "build_update", "build_reduce"):
        monkeypatch.setattr(facade, name, counted(getattr(facade, name).__wrapped__))  # not shared

    def guarded_step():
        loss = ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets)
        with jax.transfer_guard_device_to_host("disallow"):
            loss.backward()
            ddp.update_parameters(optimizer)

    guarded_step()
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        guarded_step()
        guarded_step()
    finally:
        jax.monitoring.clear_event_listeners()
    assert calls == ["build_forward", "build_backward", "build_update"] * 3
    # A stray jnp call in the wrapper would show as a separate program.
    assert [name for name in compiled if "compile" in name] == []


def test_each_forward_pass_of_a_step_draws_from_its_own_key():
    ddp = wrap((lambda key, x: {"w": np.ones(1, np.float32)}, lambda p, x, key: x + jax.random.uniform(key)))
    drawn = [float(ddp(np.zeros((rows, 1), np.float32))[0, 0]) for rows in (4, 4, 2, 2)]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_gradients_are_the_mean_of_what_backward_gathered(num_replicas):
    # loss = mean((x w)^2), w = 1, x = 1..8: d/dw = 2 mean(x^2) = 2 * 204 / 8 = 51; gathered twice: 102
    model = ((lambda key, x: {"w": np.ones((1, 1), np.float32)}), (lambda p, x: x @ p["w"]))
    ddp, x = wrap(model, num_replicas), np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    criterion = MSELoss()
    with ddp.no_sync():  # changes nothing
        ddp.backward(criterion.backward(ddp.forward(x), np.zeros_like(x)))
    ddp.backward(criterion.backward(ddp.forward(x), np.zeros_like(x)))
    assert float(ddp.sync_gradients()["w"][0, 0]) == 102
    with pytest.raises(GroupError, match=r"sync_gradients\(\)"):  # these gradients would be ignored
        ddp.backward(criterion.backward(ddp.forward(x), np.zeros_like(x)))
    ddp.update_parameters(optax.sgd(0.005))  # applies the averaged gradients, without a second reduction
    assert ddp.parameters()["w"].item() == pytest.approx(1 - 0.51, rel=1e-6)
    with pytest.raises(GroupError, match="gradients.* backward"):
        ddp.sync_gradients()


# Of 5 rows four replicas get 2, 2, 1 and none. No rows with batch statistics: at the end of this file.
@pytest.mark.parametrize(("rows", "batch_norm"), [(5, False), (5, True), (0, False)])
def test_rows_that_do_not_divide_count_once(rows, batch_norm):
    x, y = data(16).inputs[:rows], data(16).targets[:rows]
    grads, means = [], []
    for num_replicas in (1, 4):
        ddp = wrap(Net(batch_norm=batch_norm), num_replicas)
        ddp.init(data(1).inputs)
        assert ddp.eval()(x).shape == (rows, 3)
        output = ddp.train()(x)
        ddp.backward(CRITERION.backward(output, y) if rows else np.zeros((0, 3), np.float32))
        grads.append(ddp.sync_gradients())
        ddp.update_parameters(SGD)
        running = ddp.state_dict()["model_state"]
        means.append([leaf for name, leaf in named_leaves(running) if name.endswith("mean")])
    # Sums in a different order: 1e-6. Each replica normalises by its own rows; the mean over rows is one.
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), *means)
    largest = largest_gap(grads[1], jax.tree.map(np.zeros_like, grads[1]))
    assert np.isfinite(largest)
    assert (largest > 0) == (rows > 0)
    if not batch_norm:
        assert largest_gap(*grads) < 1e-6


def test_evaluation_is_deterministic_and_moves_nothing():
    ddp, x = wrap(Dropping(), 2), data(8).inputs
    first = ddp.train()(x)
    assert largest_gap(first, ddp(x)) > 0  # a different draw
    before = ddp.state_dict()
    assert largest_gap(ddp.eval()(x), ddp(x)) == 0
    assert ddp.training is False
    with pytest.raises(GroupError, match=r"eval\(\).* train\(\)"):
        ddp.backward(ddp(x))
    assert largest_gap(before, ddp.state_dict()) == 0


def test_zero_grad_may_stand_between_the_loss_and_its_backward():
    dataset = data(8)
    ours, torchs, twice = (wrap(Net(batch_norm=True), 2) for _ in range(3))

    def loss(ddp):
        return ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets)

    ours.zero_grad()
    loss(ours).backward()
    loss(twice).backward()  # gathered before, and discarded
    for ddp in (torchs, twice):
        given = loss(ddp)
        ddp.zero_grad()
        given.backward()
        assert largest_gap(ddp.sync_gradients(), ours.sync_gradients()) == 0
    for ddp in (torchs, ours):
        ddp.update_parameters(optax.sgd(0.5))
    assert largest_gap(torchs.state_dict(), ours.state_dict()) == 0  # including the running statistics


@pytest.mark.parametrize("random_keys", [False, True])
@jax.numpy_dtype_promotion("standard")  # optax's noise raises a float to an integer power
def test_a_saved_state_goes_on_alike(random_keys):
    noise = optax.add_noise(0.1, 0.55, jax.random.key(3)) if random_keys else optax.identity()
    optimizer, dataset = optax.chain(noise, optax.sgd(0.1, momentum=0.9)), data(8)
    first, other, wider = (wrap(Dropping(), num_replicas) for num_replicas in (2, 2, 4))
    step(first, dataset, optimizer)
    for ddp in (other, wider):
        ddp.load_state_dict(first.state_dict())
        assert largest_gap(first.state_dict(), ddp.state_dict()) == 0
    step(first, dataset, optimizer)
    step(other, dataset, optimizer)
    assert largest_gap(first.state_dict(), other.state_dict()) == 0


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an integer power
def test_a_part_of_a_state_replaces_that_part():
    first, then, dataset = wrap(Net(), 2), wrap(Net(), 2), data(8)
    step(first, dataset, optax.adam(0.1))
    before = first.state_dict()
    params = jax.tree.map(lambda a: a / 2, before["params"])
    first.load_state_dict({"params": params})
    assert largest_gap(first.state_dict(), before | {"params": params}) == 0
    then.init(dataset.inputs)
    then.load_state_dict({"params": params, "model_state": before["model_state"]})
    step(then, dataset, SGD)  # another optimizer, whose state begins here
    with pytest.raises(DataError, match=f"{next(iter(params))}.*params"):
        first.load_state_dict(params)


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an integer power
def test_a_state_of_before_the_first_update_starts_anew():
    ddp, dataset, optimizer, seen = wrap(Net(), 2), data(8), optax.adam(0.1), []
    ddp.init(dataset.inputs)
    first = ddp.state_dict()
    for restart in (lambda: None, lambda: ddp.load_state_dict(first), lambda: ddp.init(dataset.inputs)):
        restart()
        step(ddp, dataset, optimizer)
        seen.append(ddp.state_dict())
    assert largest_gap(seen[0], seen[1]) == largest_gap(seen[0], seen[2]) == 0


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("max_norm", "gradient"), [(6.0, 3.0), (1.5, 1.5)])
def test_gradients_are_clipped_by_their_norm_as_torch_does(num_replicas, max_norm, gradient):
    ddp = wrap(linen.Dense(1, use_bias=False), num_replicas)
    ddp.loss(lambda out, _: out.mean(), ddp(np.full((4, 1), 3.0, np.float32))).backward()
    assert ddp.clip_grad_norm_(max_norm) == 3
    assert float(ddp.sync_gradients()["kernel"][0, 0]) == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_frozen_parameters_do_not_count_in_clipping(num_replicas):
    """A NaN that only their gradients would have does not reach the others either."""

    def init(key, x):
        return {"body": np.zeros((1, 1), np.float32), "head": np.ones((1, 1), np.float32)}

    def apply(params, x):
        return jnp.sqrt(params["body"] * x) + x @ params["head"]  # the gradient of the root is infinite

    ddp, x = wrap((init, apply), num_replicas), np.float32([[1], [3]])
    ddp(x)
    optimizer = cx.with_groups(cx.SGDOptimizer(ddp, lr=1.0), [{"match": "body", "frozen": True}])
    ddp.loss(lambda out, _: out.mean(), ddp(x)).backward()
    assert ddp.clip_grad_norm_(0.5) == 2
    optimizer.step()
    assert jax.tree.map(np.ndarray.item, ddp.parameters()) == {"body": 0, "head": 0.5}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_losses_of_parts_of_an_output_are_losses_of_the_output(num_replicas):
    def apply(params, x):
        return {"a": x @ params["w"], "b": {"c": x @ params["w"] ** 2, "d": x}}

    model = (lambda key, x: {"w": np.full((1, 1), 3, np.float32)}), apply
    ddp, x = wrap(model, num_replicas), np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    output, mse = ddp(x), MSELoss()
    (mse(output["a"], x) + 0.5 * mse(output["b"]["c"], 2 * x)).backward()
    assert float(ddp.sync_gradients()["w"][0, 0]) == (2 * 2 + 0.5 * 2 * 7 * 6) * 25.5  # the mean of x ** 2
    ddp.zero_grad()
    output = ddp(x)
    twice = ddp.loss(lambda out, _: (out[0] * out[1]["d"] + out[2]).mean(), (*output.values(), output["a"]))
    twice.backward()
    assert float(ddp.sync_gradients()["w"][0, 0]) == 25.5 + 4.5
    assert not hasattr(mse(output["a"] * 2, x), "backward")


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_model_may_return_its_own_loss(num_replicas):
    def apply(params, x):
        y = x @ params["w"]
        return {"loss": (y**2).mean(-1), "shape": np.ones(x.shape[0], np.int32) * np.int32(2)}

    model = ((lambda key, x: {"w": np.ones((1, 1), np.float32)}), apply)
    ddp, x = wrap(model, num_replicas), np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    loss = ddp.loss(None, ddp(x))  # 204 / 8
    assert float(loss) == float(0.0 + loss) == float(jnp.asarray(loss)) == float(np.float32(loss)) == 25.5
    assert f"{loss / 2:.2f}" == str(float(np.asarray(loss / 2))) == "12.75"
    for product in (lambda: loss * loss, lambda: loss / loss):  # as a number the second has no gradient
        with pytest.raises(DataError, match="ddp.loss"):
            product()
    largest = ddp.loss(lambda output, _: output["loss"].max(), loss.output)
    total = 3 - (2 - sum([loss / 2, np.float64(2) * largest]) + largest)
    assert float(total) == 1 + 12.75 + 64
    total.backward()
    assert float(ddp.sync_gradients()["w"][0, 0]) == 51 / 2 + 128  # the second: w ** 2 * 64
    assert not hasattr(loss + ddp.loss(None, ddp(x)), "backward")  # of two forward passes
    assert not hasattr(loss + np.dot([2.0], [loss]), "backward")  # NumPy has made a number of it


class Critic(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return linen.Dense(1)(linen.BatchNorm(use_running_average=not train)(x))


def test_a_loss_may_call_another_wrapped_model_which_keeps_nothing_of_the_call():
    generator, critic, criterion = wrap(linen.Dense(2)), wrap(Critic()), cx.BCEWithLogitsLoss()
    noise, ones = data(8).inputs, np.ones((8, 1), np.float32)
    fake = generator(noise)
    critic.init(fake)
    before = critic.state_dict()
    generator.loss(lambda out, y: criterion(critic(out), y), fake, ones).backward()

    def by_hand(params):
        variables = {"params": before["params"], **before["model_state"]}
        out = linen.Dense(2).apply({"params": params}, noise)
        scores, _ = Critic().apply(variables, out, True, mutable=["batch_stats"])
        return optax.sigmoid_binary_cross_entropy(scores, ones).mean()

    expected = jax.grad(by_hand)(generator.parameters())
    assert largest_gap(generator.sync_gradients(), expected) < 1e-6
    assert largest_gap(critic.state_dict(), before) == 0
    critic(fake)


@dataclass
class Scaled:
    """A loss without a hash, whose number changes from step to step."""

    factor: float = 1.0

    def __call__(self, output, target):
        return self.factor * (output - target).mean()


@pytest.mark.parametrize(
    "penalty",
    [
        lambda ddp, x: optax.tree.norm(ddp.parameters()),
        lambda ddp, x: jax.grad(lambda one: ddp(one).sum())(x).sum(),
        lambda ddp, x: ddp(x).mean(),
    ],
)
def test_a_part_of_a_loss_that_would_have_no_gradient_is_refused(penalty):
    x, y = data(4).take(np.arange(4))
    ddp = wrap(Net(), 1)
    output = ddp(x)
    with pytest.raises(ConfigError, match="penalty"):
        ddp.loss(lambda out, y: CRITERION(out, y).mean() + penalty(ddp, x), output, y)
    ddp.loss(CRITERION, output, y).backward()


def test_a_function_is_called_with_what_it_reads_now():
    ddp = wrap(((lambda key, x: {"w": np.ones((1, 1), np.float32)}), lambda params, x: x @ params["w"]))
    scaled = Scaled()

    class Own(Loss):
        per_example = lambda self, output, target: scaled(output, target)[None]  # noqa: E731

    for factor in (1.0, 3.0):
        scaled.factor = factor
        for loss in (lambda output, target: factor * (output - target).mean(), scaled, Own()):  # noqa: B023
            ddp.loss(loss, ddp(np.float32([[1.0]])), np.float32([[0.0]])).backward()
            assert float(ddp.sync_gradients()["w"][0, 0]) == factor
            ddp.zero_grad()
        assert float(Own().backward(np.float32([[2.0]]), np.float32([[1.0]]))[0, 0]) == factor


SCALAR = (lambda key, x: {"s": np.float32(1)}), lambda params, x: (x, params["s"])
THREE = np.zeros((3, 3), np.float32), np.array([0, 1, 2**40])  # outputs, and labels beyond int32


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ddp: wrap(Net()).parameters(), GroupError, r"AdamOptimizer\(ddp"),
        (lambda ddp: ddp.backward(np.zeros((8, 2), np.float32)), DataError, r"float32\[8,2\]"),
        (lambda ddp: ddp(np.full((8, 4), 2**40)), DataError, str(2**40)),
        (lambda ddp: ddp.loss(CRITERION, *THREE), DataError, str(2**40)),
        (lambda ddp: CRITERION.forward(*THREE), DataError, str(2**40)),
        (lambda ddp: CRITERION.backward(*THREE), DataError, str(2**40)),
        (lambda ddp: step(wrap(Net()), data(8), optax.polyak_sgd(1.0)), ConfigError, "value"),
        (lambda ddp: wrap(SCALAR)(data(8).inputs), DataError, r"jnp\.full"),
        (lambda ddp: step(ddp, data(8), optax.sgd(0.1)), ConfigError, "update_parameters .*optimizer"),
    ],
)
def test_mistakes_are_named(call, error, message):
    ddp = wrap(Net(), 2)
    step(ddp, data(8), SGD)
    ddp(data(8).inputs)
    with pytest.raises(error, match=message):
        call(ddp)


def test_a_loss_of_other_values_than_the_models_is_not_pulled_back():
    ddp, dataset = wrap(Net(), 2), data(8)
    before = ddp(dataset.inputs)
    with pytest.raises(DataError):
        ddp.loss(CRITERION, before / 0.1, dataset.targets).backward()
    ddp.loss(CRITERION, np.array(before), dataset.targets).backward()  # equal numbers in a different array
    ddp(dataset.inputs + 1)
    with pytest.raises(DataError):
        ddp.loss(CRITERION, before, dataset.targets).backward()


class Mixed(linen.Module):
    """A norm whose input has the batch in an unknown order."""

    axis_name: str | None = None

    @linen.compact
    def __call__(self, x, train: bool = False):
        mixed = x.reshape(x.shape[1], -1)  # no dimension is only the batch, nor begins with it
        return linen.BatchNorm(use_running_average=not train, axis=0, axis_name=self.axis_name)(
            mixed
        ).reshape(x.shape)


@pytest.mark.parametrize(
    ("axis_name", "rows", "message"),
    [(None, 7, "2 devices"), (None, 0, "2 devices"), ("batch", 6, "axis_name='batch'")],
)
def test_a_norm_that_cannot_have_its_statistics_gives_no_numbers(axis_name, rows, message):
    with pytest.raises(ConfigError, match=f"BatchNorm .*{message}"):
        wrap(Mixed(axis_name), 2)(np.ones((rows, 8), np.float32))  # 7 and 0 rows: padding would count


@pytest.mark.parametrize(
    "loss",
    [cx.CrossEntropyLoss(), cx.CrossEntropyLoss(ignore_index=-100), lambda out, y: out.mean(-1) ** 2],
)
def test_a_batch_without_rows_is_a_loss_of_0_and_changes_nothing(loss):
    x, y = np.ones((8, 5), np.float32), np.zeros(8, np.int32)
    ddp = wrap(Dropping(), 2)
    optimizer = cx.SGDOptimizer(ddp, lr=0.1)
    ddp.loss(loss, ddp(x), y).backward()
    optimizer.step()
    before = jax.tree.map(np.array, ddp.state_dict())
    empty = ddp.loss(loss, ddp(x[:0]), y[:0])
    assert empty.item() == 0
    empty.backward()
    optimizer.step()
    after = ddp.state_dict()
    for part in ("params", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, before[part], after[part])


def test_a_batch_without_rows_has_no_gradient_where_the_model_is_nan_at_zeros():
    def init(key, x):
        return {"kernel": np.ones((2, 1), np.float32)}

    def apply(params, x):
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ params["kernel"]

    ddp, x = wrap((init, apply), 2), np.float32([[3, 4], [3, 4]])
    for rows in (x, x[:0]):
        ddp.loss(lambda out, _: out[:, 0], ddp(rows)).backward()
    np.testing.assert_allclose(ddp.sync_gradients()["kernel"][:, 0], [0.6, 0.8], rtol=1e-6)


def in_place(array):
    """A copy at an address that jax reads from without copying."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    made = raw[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


class Slow(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(6):
            x = linen.relu(linen.Dense(1024)(x))
        return linen.Dense(1)(x)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_buffer_may_be_refilled_before_the_numbers_are_read(num_replicas):
    x = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)
    ddp, y = wrap(Slow(), num_replicas, seed=0), x[:, :1] * 2

    def kept(inputs, target, wipe):
        ddp.train()
        loss = ddp.loss(cx.MSELoss(), ddp(inputs), target)
        wipe(target)
        loss.backward()
        ddp.eval()
        output = ddp(inputs)
        wipe(inputs)
        grads = ddp.sync_gradients()
        ddp.zero_grad()
        return loss.item(), np.array(output), jax.tree.map(np.array, grads)

    want = kept(x.copy(), y.copy(), lambda array: None)
    found = kept(in_place(x), in_place(y), lambda array: array.fill(0.0))
    jax.tree.map(np.testing.assert_array_equal, want, found)
    given = jax.tree.map(in_place, ddp.parameters())
    ddp.load_state_dict({"params": given})
    before = jax.tree.map(np.array, given)
    jax.tree.map(lambda array: array.fill(0.0), given)
    jax.tree.map(np.testing.assert_array_equal, before, ddp.parameters())
