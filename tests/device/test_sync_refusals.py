"""Bad input to precision, strategies and hooks: refused before a step, by a name and a way out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.core.precision import parse_policy
from cyxjax.core.strategy import Sync
from cyxjax.data.batches import batch_size_from_global
from cyxjax.distributed import comm_hooks
from cyxjax.distributed.ddp_config import DDPConfig
from cyxjax.errors import ConfigError
from cyxjax.sync.compressed import cast_reducer
from cyxjax.sync.registry import build_sync
from tests.device.test_ddp import wrap
from tests.support.models import Net
from tests.support.strategies import Alone, mean_of, params, random_grads

LR = 0.1


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("power_sgd", {"rank": 2.5}, r"rank=2\.5 .*power_sgd.* int\b"),
        ("power_sgd", {"rank": "4"}, "rank='4' .* 4"),
        ("power_sgd", {"rank": True}, r"rank=True .*power_sgd.* int\b"),  # not rank 1
        ("local_sgd", {"every": 2.5}, r"every=2\.5 .*local_sgd.* int\b"),
        ("int8", {"block": 2.5}, r"block=2\.5 .*int8.* int\b"),
        ("fp16", {"error_feedback": "no"}, "error_feedback='no' .*fp16.* bool"),  # "no" is true in Python
        ("bucketed", {"bucket_size_mb": None}, "bucket_size_mb=None .*bucketed.* float"),
        ("bucketed", {"bucket_size_mb": float("nan")}, "bucket_size_mb=nan"),
        ("diloco", {"outer_lr": float("nan")}, "outer_lr=nan"),
        ("mean", {"rank": 4}, "rank"),
    ],
)
def test_options_of_another_kind_are_refused(name, options, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        build_sync(name, optax.sgd(LR), options)


def test_numbers_of_numpy_and_whole_sizes_are_taken():
    syncs = [
        build_sync("local_sgd", optax.sgd(LR), {"every": np.int64(4)}),
        build_sync("bucketed", optax.sgd(LR), {"bucket_size_mb": 25}),
    ]
    assert all(isinstance(sync, Sync) for sync in syncs)


@pytest.mark.parametrize(
    ("name", "nearest"), [("zero-1", "zero1"), ("powersgd", "power_sgd"), ("local-sgd", "local_sgd")]
)
def test_unknown_strategies_name_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"comm='{name}' .*'{nearest}'"):
        build_sync(name, optax.sgd(LR))


def test_a_rank_larger_than_the_matrix_is_its_full_rank():
    # The 6 x 4 matrix has rank 4 at most; full rank loses nothing but rounding of two products.
    grads = random_grads(2, 0)
    options = {"rank": 100, "min_compression": 0, "start_iter": 0}
    got = Alone(build_sync("power_sgd", optax.sgd(LR), options), 2).step(grads).copies()[0]
    wanted = jax.tree.map(lambda p, g: p - LR * g, params(), mean_of(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)


def test_a_rank_that_would_send_more_than_the_matrix_is_refused():
    with pytest.raises(ConfigError, match="rank=100 .*min_compression"):
        Alone(build_sync("power_sgd", optax.sgd(LR), {"rank": 100}), 2)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32])
def test_only_half_floats_are_cast_to(dtype):
    with pytest.raises(ConfigError, match=f"{jnp.dtype(dtype).name}.* float16, bfloat16"):
        cast_reducer(dtype)


@pytest.mark.parametrize("text", ["fp8", "int8", "compute=float64", "", "params=float32;compute=bfloat16"])
def test_unknown_precisions_list_the_known(text):
    with pytest.raises(ConfigError, match=r"^precision=.* float32, bfloat16, float16"):
        parse_policy(text)


def test_accumulation_that_does_not_divide_names_the_nearest():
    assert batch_size_from_global(96, 4, 3) == 8
    # 100 is no multiple of 4 replicas x 3 micro-batches; 96 is the nearest.
    with pytest.raises(ConfigError, match="global_batch_size=100 .*4 replicas x .*96"):
        batch_size_from_global(100, 4, 3)


@pytest.mark.parametrize("name", ["zero1", "local_sgd", "diloco"])
def test_a_strategy_is_no_hook(name):
    sync = build_sync(name, optax.sgd(LR))
    with pytest.raises(ConfigError, match="comm='zero1'.*bf16_compress_hook"):
        wrap(Net()).register_comm_hook(None, sync)
    with pytest.raises(ConfigError, match="comm='zero1'.*bf16_compress_hook"):
        wrap(Net(), config=DDPConfig(comm_hook=lambda state: sync))


@pytest.mark.parametrize("hook", ["zero1", 3])
def test_a_name_is_no_hook(hook):
    with pytest.raises(ConfigError, match=f"hook {hook!r} .*cyxjax"):
        comm_hooks.resolve(None, hook)
