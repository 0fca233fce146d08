"""What every test shares: strict dtypes and ranks, and eight virtual CPU devices."""

import os
import sys
from collections.abc import Iterator

# Before jax is imported: eight devices in one process need a pool of eight threads, or their
# collectives starve one another (XLA sizes the pool by NPROC).
os.environ.setdefault("NPROC", "8")

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Tests compile far more than they compute: LLVM's costly passes are left out (a third less time in all).
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(params=[1, 2, 4, 8])
def num_replicas(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A trainer makes a group of one if there is none, and `init` writes what jax reads into the environment:
    the next test starts without either, and so do the processes it starts."""
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield
    process_group = sys.modules.get("cyxjax.distributed.process_group")
    if process_group is not None:
        process_group.finalize()
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)
