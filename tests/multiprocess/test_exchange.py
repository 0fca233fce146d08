"""One exchange per step over gloo: fused messages give the bits of separate messages."""

import pytest

from cyxjax.distributed.spawning import spawn
from tests.multiprocess import exchange_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("forked_spawn")]


# The optimizer does not change the messages, so the second one runs with three ranks in the slow row only.
@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [
        (2, "adam"),
        (3, "momentum"),
        pytest.param(3, "adam", marks=[pytest.mark.slow, pytest.mark.wide]),
    ],
)
def test_one_exchange_a_step_and_the_wrapper_has_its_bits(world_size, optimizer):
    assert spawn(exchange_ranks.joined_apart_and_facade, (optimizer,), nprocs=world_size) is None
