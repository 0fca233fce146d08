"""One exchange a step over gloo: what travels together arrives with the bits of what travels apart."""

import pytest

from cyxjax.distributed.spawning import spawn
from tests.multiprocess import exchange_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("forked_spawn")]


# Which rule it is changes nothing of what is sent: the second one meets three ranks in the slow row.
@pytest.mark.parametrize(
    ("world_size", "optimizers"),
    [
        (2, ["adam"]),
        (3, ["momentum"]),
        pytest.param(3, ["momentum", "adam"], marks=[pytest.mark.slow, pytest.mark.wide]),
    ],
)
def test_one_exchange_a_step_and_the_wrapper_has_its_bits(world_size, optimizers):
    assert spawn(exchange_ranks.joined_apart_and_facade, (optimizers,), nprocs=world_size) is None
