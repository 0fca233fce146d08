"""The wrapper between real processes: the numbers of one big batch for any placement of devices."""

import numpy as np
import pytest

from cyxjax.distributed.spawning import spawn
from tests.multiprocess import ddp_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("forked_spawn")]


def test_processes_and_devices_give_the_same_numbers(tmp_path):
    # 4 replicas as 2 processes of 2 devices, and as 1 process of 4: the same rows on the same replicas.
    # Means over replicas are summed in a different order, over 4 steps: 1e-6.
    for nprocs in (1, 2):
        spawn(ddp_ranks.save_trained, (str(tmp_path / f"{nprocs}.npz"), 4), nprocs=nprocs)
    one, two = (np.load(tmp_path / f"{nprocs}.npz") for nprocs in (1, 2))
    assert len(one.files) == 8
    for name in one.files:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-5, atol=1e-6)


def test_two_ranks_with_uneven_rows_other_models_and_hooks():
    assert spawn(ddp_ranks.two_ranks, nprocs=2) is None  # a failed assertion in a rank raises here
