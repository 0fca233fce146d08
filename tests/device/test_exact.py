"""`reproducibility: exact`: one set of bits for any number of devices that share the work."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest

from cyxjax.core.mesh import build_mesh
from cyxjax.errors import ConfigError
from cyxjax.train.settings import resolve
from cyxjax.train.start.dispatch import placer_for
from tests.support.exact import config, problem, train


@contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = jax.config._read(name)  # for all threads: programs are compiled in several
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


@pytest.fixture(autouse=True, scope="module")
def numbers_are_promoted() -> Iterator[None]:
    with _set("jax_numpy_dtype_promotion", "standard"):  # optax's Adam takes a power of a counter
        yield


@pytest.fixture
def as_users_compile() -> Iterator[None]:
    """With LLVM's passes, which contract and reorder: they show the faults that are not of the order."""
    with _set("jax_disable_most_optimizations", False):
        yield


# 3 and 5 do not divide 8 parts: devices hold two or three, or one or two. Adam, clipping, dropout, a ragged
# last batch and evaluation everywhere; BatchNorm and max pooling in the CNN.
def test_three_devices_give_the_bits_of_one():
    one = problem("mlp")
    assert train(one, 3).bits == train(one, 1).bits


@pytest.mark.parametrize(
    ("name", "devices"),
    [
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
def test_any_number_of_devices_gives_the_same_bits(name, devices, as_users_compile):
    one = problem(name)
    alone = train(one, 1)
    for count in devices:
        assert train(one, count).bits == alone.bits, count


def test_the_plain_mean_gives_other_bits():
    # the control: a sum over two devices has another order, and the comparison sees it
    one, plain = problem("mlp"), {"reproducibility": "none"}
    assert train(one, 1, **plain).params != train(one, 2, **plain).params


def test_more_devices_than_parts_are_refused():
    with pytest.raises(ConfigError, match="8 devices .*virtual_replicas=4"):
        placer_for(resolve(config(virtual_replicas=4), 8).step, build_mesh())
