"""Hooks, mixed precision, DataParallel and spawn from a notebook, in one process."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyxjax as cx
from cyxjax.distributed import comm_hooks
from cyxjax.distributed.ddp_state import DDPConfig, compiler_options
from cyxjax.errors import ConfigError, GroupError
from cyxjax.sync.compressed import RESIDUAL_SPEC, cast_reducer
from tests.support.models import CRITERION, Net, data, largest_gap
from tests.support.wrapped import step, wrap


def mean_grads(ddp, dataset):
    ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets).backward()
    return jax.device_get(ddp.sync_gradients())


@pytest.mark.parametrize(("name", "bits"), [("fp16_compress_hook", 11), ("bf16_compress_hook", 8)])
def test_short_floats_round_each_replicas_gradient_once(name, bits):
    exact, short = wrap(Net(), 2), wrap(Net(), 2, config=DDPConfig(comm_hook=getattr(comm_hooks, name)))
    dataset = data(8)
    plain, rounded = mean_grads(exact, dataset), mean_grads(short, dataset)
    gap, largest = largest_gap(plain, rounded), largest_gap(plain, jax.tree.map(np.zeros_like, plain))
    # One rounding on each replica and one of the mean; parts may be several times larger than their mean.
    assert 0 < gap < 8 * largest * 2.0**-bits


def test_power_sgd_by_torchs_module_spelling():
    from cyxjax.distributed.comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=0, min_compression_rate=0.5
    )
    ddp = wrap(Net(), 2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    kernel = mean_grads(ddp, data(8))["Dense_0"]["kernel"]
    assert np.linalg.matrix_rank(kernel, tol=1e-6) == 1
    ddp.zero_grad()
    ddp.register_comm_hook(None, comm_hooks.allreduce_hook)  # replaces it
    assert largest_gap(mean_grads(ddp, data(8)), mean_grads(wrap(Net(), 2), data(8))) == 0


def test_a_hook_of_ones_own_is_an_optax_transformation():
    ddp = wrap(Net(), 2)
    ddp.register_comm_hook(
        2.0, lambda k: optax.stateless(lambda g, p: jax.tree.map(lambda a: k * jax.lax.pmean(a, "data"), g))
    )
    assert (
        largest_gap(
            mean_grads(ddp, data(8)), jax.tree.map(lambda a: 2 * a, mean_grads(wrap(Net(), 2), data(8)))
        )
        == 0
    )


def test_autocast_computes_in_the_dtype_and_returns_float32():
    seen = []

    def apply(params, x):
        seen.append((x.dtype, params["w"].dtype))
        return x @ params["w"]

    ddp = wrap(((lambda key, x: {"w": np.ones((1, 1), np.float32)}), apply))
    x = np.full((2, 1), 1 + 2.0**-10, np.float32)
    assert float(ddp(x)[0, 0]) == 1 + 2.0**-10
    with cx.amp.autocast(dtype=jnp.bfloat16):
        output = ddp(x)
        ddp.backward(jnp.ones_like(output))
    assert seen == [(jnp.float32, jnp.float32), (jnp.bfloat16, jnp.bfloat16)]
    assert output.dtype == jnp.float32
    assert float(output[0, 0]) == 1  # bfloat16 has 8 bits
    assert ddp.sync_gradients()["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "hook",
    [
        (comm_hooks.PowerSGDState(start_powerSGD_iter=0, min_compression_rate=0.5), comm_hooks.powerSGD_hook),
        lambda state: comm_hooks.CommHook(cast_reducer(jnp.bfloat16), RESIDUAL_SPEC),
        comm_hooks.CommHook(cast_reducer(jnp.bfloat16), RESIDUAL_SPEC),
    ],
)
def test_a_hook_s_error_feedback_forgets_a_step_that_overflowed(hook):
    dataset, optimizer, scaler = data(8), optax.sgd(0.1), cx.amp.GradScaler()
    ddp = wrap(Net(), 2, config=DDPConfig(comm_hook=hook))
    kept = []
    for factor in (1.0, np.inf, 1.0):
        scaler.scale(ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets) * factor).backward()
        kept.append(scaler.step(optimizer))
        scaler.update(2.0)
    assert kept == [True, False, True]


def test_a_scaler_backs_off_grows_and_changes_no_number():
    dataset, optimizer = data(8), optax.sgd(0.1)
    plain, scaled = wrap(Net(), 2), wrap(Net(), 2)
    scaler = cx.amp.GradScaler(init_scale=2.0**10, growth_interval=2)
    kept, scales = [], []
    for factor in (1.0, np.inf, 1.0, 1.0):
        loss = scaled.loss(CRITERION, scaled(dataset.inputs), dataset.targets)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)  # once per step: `step` does not repeat it
        kept.append(scaler.step(optimizer))
        scaler.update()
        scales.append(scaler.get_scale())
        if kept[-1]:
            step(plain, dataset, optimizer)
    assert kept == [True, False, True, True]
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    # powers of two scale without rounding
    assert largest_gap(plain.parameters(), scaled.parameters()) == 0
    again = cx.amp.GradScaler()
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 2.0**10


@pytest.mark.parametrize("together", [False, True])
def test_a_scaler_of_two_models_unscales_the_gradients_of_each(together):
    dataset, scaler, models = data(8), cx.amp.GradScaler(), [wrap(Net(), 2), wrap(Net(), 2)]
    plain, optimizers = wrap(Net(), 2), [cx.SGDOptimizer(ddp, lr=0.1) for ddp in models]
    again = cx.SGDOptimizer(plain, lr=0.1)

    def backward(ddp, scale):
        scale(ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets)).backward()

    for _ in range(2):
        backward(plain, lambda loss: loss)
        again.step()
        for ddp in models if together else []:
            backward(ddp, scaler.scale)
        for ddp, optimizer in zip(models, optimizers, strict=True):
            if not together:
                backward(ddp, scaler.scale)
            assert scaler.step(optimizer)
        scaler.update()
        assert [largest_gap(ddp.parameters(), plain.parameters()) for ddp in models] == [0, 0]
    backward(models[0], lambda loss: scaler.scale(loss) * np.inf)
    backward(models[1], scaler.scale)
    assert [scaler.step(optimizer) for optimizer in optimizers] == [False, True]
    backward(models[0], scaler.scale)
    with pytest.raises(GroupError, match="update"):
        scaler.step(optimizers[0])
    scaler.update()
    assert scaler.get_scale() == 2.0**15  # one of the two was not finite
    backward(models[0], lambda loss: scaler.scale(loss) * np.inf)
    assert not scaler.unscale_(optimizers[0])
    scaler.update()
    assert scaler.get_scale() == 2.0**14  # also if the step is left out


def test_a_scaler_that_is_off_passes_everything_through():
    off, ddp, dataset = cx.amp.GradScaler(enabled=False), wrap(Net()), data(4)
    loss = ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets)
    off.load_state_dict(cx.amp.GradScaler().state_dict())
    off.update(128.0)
    scaled = off.scale(loss)
    assert float(scaled) == float(loss)
    assert off.get_scale() == 1.0
    scaled.backward()
    optimizer = optax.sgd(0.1)
    assert off.step(optimizer)
    off.scale(ddp.loss(CRITERION, ddp(dataset.inputs), dataset.targets)).backward()
    assert off.step(optimizer)  # without an `update`, which has nothing to adapt


def test_buckets_are_a_compiler_option_on_gpus():
    assert compiler_options("cpu", 25) is None
    assert compiler_options("gpu", 25) == {"xla_gpu_all_reduce_combine_threshold_bytes": "26214400"}


def test_spawn_from_a_notebook_gives_the_command_instead(monkeypatch):
    def train(rank, world_size):
        raise AssertionError("must not be called")

    train.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(ConfigError, match=r"python -m cyxjax.launch --nproc-per-node 2 train.py"):
        cx.distributed.spawn(train, nprocs=2)


@pytest.mark.parametrize("nprocs", [2, 0])
def test_spawn_refuses_more_ranks_than_the_world_has(monkeypatch, nprocs):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=f"nprocs={nprocs} .*RANK=3 .*WORLD_SIZE=4"):
        cx.distributed.spawn(print, nprocs=nprocs)
