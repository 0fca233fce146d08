"""A model and its wrapper share values and mode: the last assignment counts."""

import copy

import jax
import numpy as np
import pytest
from flax import linen, nnx

import cyxjax as cx
from cyxjax.errors import ConfigError
from tests.support.wrapped import wrap

X = np.eye(2, dtype=np.float32)
Y = np.zeros((2, 2), np.float32)


class Flax(nnx.Module):
    """A layer, the statistics of a norm, a mode: everything that a wrapper shares."""

    def __init__(self, width=2):
        self.dense = nnx.Linear(2, width, rngs=nnx.Rngs(0))
        self.seen = nnx.BatchStat(np.zeros((), np.float32))
        self.drop = nnx.Dropout(0.9, rngs=nnx.Rngs(1))

    def __call__(self, x):
        self.seen[...] = self.seen[...] + 1
        return self.drop(self.dense(x))


def sequential():
    return cx.SequentialModel([cx.LinearModule(2, 2), cx.BatchNormModule(2), cx.DropoutModule(0.9)])


def step(ddp, optimizer):
    ddp.train()
    ddp.loss(cx.MSELoss(), ddp(X), Y).backward()
    ddp.update_parameters(optimizer)
    ddp.eval()


@pytest.fixture(params=[sequential, Flax])
def model(request):
    return request.param()


def test_the_model_itself_has_the_trained_values_after_each_step(model):
    ddp, optimizer = wrap(model), cx.SGDOptimizer(0.5)
    model.eval()
    before = np.array(model(X))
    for _ in range(2):
        step(ddp, optimizer)
        np.testing.assert_array_equal(model(X), ddp(X))
    assert np.abs(np.asarray(model(X)) - before).max() > 1e-3
    assert ddp.get_model() is ddp.module is model


def test_a_sequential_model_saves_and_copies_what_was_trained(tmp_path):
    model = sequential()
    ddp, optimizer = wrap(model), cx.SGDOptimizer(0.5)
    step(ddp, optimizer)
    model.save(tmp_path / "model")
    twin, after_one = copy.deepcopy(model), np.array(ddp(X))
    step(ddp, optimizer)
    np.testing.assert_array_equal(cx.SequentialModel.load(tmp_path / "model").eval()(X), after_one)
    np.testing.assert_array_equal(twin(X), after_one)  # training does not change a copy
    np.testing.assert_array_equal(model(X), ddp(X))


def test_what_was_read_of_an_nnx_module_outlives_the_next_step():
    model = Flax()
    ddp, optimizer = wrap(model), cx.SGDOptimizer(0.5)
    step(ddp, optimizer)
    best = model.dense.kernel[...]
    kernel = np.array(best)
    step(ddp, optimizer)
    np.testing.assert_array_equal(best, kernel)
    assert np.abs(np.asarray(model.dense.kernel[...]) - kernel).max() > 0


def test_a_state_set_to_another_shape_is_the_wrappers():
    model = Flax()
    ddp = wrap(model)
    model.seen.set_value(np.zeros(3, np.float32))
    assert ddp.state_dict()["model_state"]["seen"].shape == (3,)


def test_values_set_in_the_model_are_the_wrappers(model):
    ddp = wrap(model)
    ddp.eval()
    if isinstance(model, cx.SequentialModel):
        model.set_values(jax.tree.map(np.zeros_like, model.parameters()), model.model_state())
    else:
        model.dense.kernel[...] = model.dense.kernel[...] * 0
    assert not np.any(ddp(X))
    assert not any(map(np.any, jax.tree.leaves(ddp.parameters())))


@pytest.mark.parametrize("name", ["kernel", "dense"])
def test_what_is_replaced_after_wrapping_is_refused(name):
    model = Flax()
    ddp = wrap(model)
    if name == "kernel":
        model.dense.kernel = nnx.Param(np.zeros((2, 2), np.float32))
    else:
        model.dense = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    with pytest.raises(ConfigError, match=f"'{name}'"):
        ddp(X)


def test_statistics_that_a_direct_call_moved_are_the_wrappers(model):
    ddp = wrap(model)
    model(X)  # in training mode
    held = jax.tree.leaves(ddp.state_dict()["model_state"])
    own = jax.tree.leaves(model.model_state()) if hasattr(model, "model_state") else [model.seen[...]]
    assert any(map(np.any, own))
    for a, b in zip(held, own, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_same_bits_in_other_arrays_are_nothing_new():
    model = Flax()
    ddp = wrap(model)
    model.dense.kernel[...] = jax.numpy.array(model.dense.kernel[...])  # as nnx.jit leaves them
    assert ddp._model_sync.pull(1) is None


def test_train_and_eval_of_the_model_reach_the_wrapper_and_back(model):
    ddp = wrap(model)
    assert ddp.training
    model.eval()
    assert not ddp.training
    np.testing.assert_array_equal(ddp(X), ddp(X))
    ddp.train()
    assert model.training if isinstance(model, cx.SequentialModel) else not model.drop.deterministic
    assert np.any(np.asarray(ddp(np.ones((64, 2), np.float32))) == 0)  # 0.9 dropped


def test_layers_of_an_nnx_module_in_two_modes_are_refused():
    model = Flax()
    model.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    ddp = wrap(model)
    model.norm.eval()
    with pytest.raises(ConfigError):
        ddp(X)
    model.eval()
    np.testing.assert_array_equal(ddp(X), ddp(X))


def test_values_set_in_the_model_of_one_of_several_processes_are_refused(model):
    ddp = wrap(model)
    assert ddp._model_sync.pull(2) is None
    model(X)
    with pytest.raises(ConfigError) as refused:
        ddp._model_sync.pull(2)
    assert refused.value.key in ("1_batch_norm/mean", "seen")


def test_a_sequential_model_within_an_nnx_module_trains():
    class Around(nnx.Module):
        def __init__(self):
            self.inner = sequential()

        def __call__(self, x):
            return self.inner(x)

    model = Around()
    ddp, optimizer = wrap(model), cx.SGDOptimizer(0.5)
    before = model.inner.parameters()["0_linear"]["kernel"]
    many = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    assert not np.array_equal(ddp(many), ddp(many))  # each pass draws a new mask
    ddp.loss(cx.MSELoss(), ddp(many), np.zeros_like(many)).backward()
    ddp.update_parameters(optimizer)
    ddp.eval()
    assert np.abs(model.inner.parameters()["0_linear"]["kernel"] - before).max() > 0
    assert not model.inner.training
    np.testing.assert_array_equal(model(X), ddp(X))


@pytest.mark.parametrize(
    "written",
    [
        lambda ddp, loss: [loss(out, Y) for out in (ddp(X), ddp(X))][0],
        lambda ddp, loss: loss(ddp(X), Y) + loss(ddp(X), Y),
        lambda ddp, loss: loss(ddp(X) / 2.0, Y),
        lambda ddp, loss: loss(ddp(X), Y) + 0.1 * (ddp.parameters()["kernel"] ** 2).sum(),
        lambda ddp, loss: loss(ddp.eval()(X), Y),
    ],
    ids=["two passes", "a sum", "out / T", "a penalty", "eval"],
)
def test_a_loss_of_plain_arrays_has_no_backward(written):
    ddp = wrap(linen.Dense(2))
    ddp.init(X)
    value = written(ddp, cx.MSELoss())
    assert np.isfinite(float(value))
    with pytest.raises(AttributeError):
        value.backward()
