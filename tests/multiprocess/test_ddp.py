"""The wrapper between real processes: the numbers of one big batch for any placement of devices."""

import numpy as np
import pytest

from cyxjax.distributed.spawning import spawn
from cyxjax.testing import run_ranks
from tests.multiprocess import ddp_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("forked_spawn")]


def test_processes_and_devices_give_the_same_numbers():
    # 4 replicas as 2 processes of 2 devices, and as 1 process of 4: the same rows on the same replicas.
    (one,), (two, other) = (run_ranks(ranks, ddp_ranks.trained, devices=4 // ranks) for ranks in (1, 2))
    assert [found[0] for found in (one, two, other)] == [4] * 3
    assert len(one[1]) == 8
    for a, b, same in zip(one[1], two[1], other[1], strict=True):
        # Means over replicas are summed in a different order, over 4 steps: 1e-6.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(b, same)


def test_two_ranks_with_uneven_rows_other_models_and_hooks():
    assert spawn(ddp_ranks.two_ranks, nprocs=2) is None  # a failed assertion in a rank raises here
