"""The fast path that puts rows on several devices has the same result as `device_put`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from cyxjax.core.mesh import PER_REPLICA, build_mesh, build_put_rows
from cyxjax.errors import DataError
from cyxjax.launch.backend import jax_private

DTYPES = ["float32", "float64", "float16", "int32", "int64", "uint8", "bool", jnp.bfloat16, "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_arrive_as_device_put_puts_them(dtype):
    mesh = build_mesh(jax.devices()[:4])
    tree = {"x": (np.arange(8 * 3).reshape(8, 3) % 5).astype(dtype), "y": np.arange(8).astype(dtype)}
    put = build_put_rows(mesh, jax_private.shard_putter())(tree)
    for name, wanted in jax.device_put(tree, NamedSharding(mesh, PER_REPLICA)).items():
        have = put[name]
        assert (have.dtype, have.shape, have.sharding) == (wanted.dtype, wanted.shape, wanted.sharding)
        assert have.committed
        assert not have.weak_type
        np.testing.assert_array_equal(np.asarray(have), np.asarray(wanted))
        for mine, theirs in zip(have.addressable_shards, wanted.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (theirs.device, theirs.index)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (np.zeros((6, 2), np.float32), ValueError, "divide"),
        (np.array([1, 2, 2**32, 4]), DataError, "4294967296"),
    ],
)
def test_rows_that_do_not_divide_or_do_not_fit_are_refused_as_ever(rows, error, message):
    put = build_put_rows(build_mesh(jax.devices()[:4]), jax_private.shard_putter())
    with pytest.raises(error, match=message):
        put(rows)
