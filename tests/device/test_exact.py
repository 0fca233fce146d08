"""`reproducibility: exact`: one set of bits for any number of devices that share the work."""

from collections.abc import Iterator

import jax
import pytest

from cyxjax.core.mesh import build_mesh
from cyxjax.errors import ConfigError
from cyxjax.train.settings import resolve
from cyxjax.train.start.dispatch import dispatch_for
from tests.support.exact import config, problem, train

EARNEST = {
    "jax_disable_most_optimizations": False,  # LLVM's passes contract and reorder: they show the faults
    "jax_numpy_dtype_promotion": "standard",  # optax's Adam takes a power of a counter
}


@pytest.fixture(autouse=True, scope="module")
def as_users_run_it() -> Iterator[None]:
    before = {name: jax.config._read(name) for name in EARNEST}
    for name, value in EARNEST.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


# 3 and 5 do not divide 8 parts: devices hold two or three, or one or two. Adam, clipping, dropout, a ragged
# last batch and evaluation everywhere; BatchNorm and max pooling in the CNN.
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("mlp", (3,)),
        ("cnn", (2,)),
        pytest.param("gpt", (2,), marks=pytest.mark.slow),
        *(
            # A limit of their own: each device compiles for itself, minutes on a busy machine.
            pytest.param(name, (count,), marks=(pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900)))
            for name in ("mlp", "cnn", "gpt")
            for count in (2, 3, 5, 8)
        ),
        pytest.param(
            "resnet18", (2, 3), marks=(pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900))
        ),
    ],
)
def test_any_number_of_devices_gives_the_same_bits(name, devices):
    one = problem(name)
    alone = train(one, 1)
    for count in devices:
        assert train(one, count).bits == alone.bits, count


def test_the_plain_mean_gives_other_bits():
    # the control: a sum over two devices has another order, and the comparison sees it
    one, plain = problem("cnn"), {"reproducibility": "none"}
    assert train(one, 1, **plain).params != train(one, 2, **plain).params


def test_more_devices_than_parts_are_refused():
    with pytest.raises(ConfigError, match="8 devices for virtual_replicas=4"):
        dispatch_for(resolve(config(virtual_replicas=4), 8).step, build_mesh())
