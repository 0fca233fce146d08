"""One exchange a step over gloo: what travels together arrives with the bits of what travels apart."""

import pytest

from cyxjax.distributed.spawning import spawn
from tests.multiprocess import exchange_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("forked_spawn")]


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_exchange_a_step_and_the_wrapper_has_its_bits(world_size):
    assert spawn(exchange_ranks.joined_apart_and_facade, nprocs=world_size) is None
