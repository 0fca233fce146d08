"""`reproducibility: exact`: one set of bits for any number of devices that share the work.

Of halves too, and of others' kinds: a loss that weighs its tokens, over an LSTM; optimizers in turns.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.mesh import build_mesh
from cyxjax.data.sources import ArrayDataset
from cyxjax.errors import ConfigError
from cyxjax.train.settings import resolve
from cyxjax.train.start.dispatch import placer_for
from scripts.examples import gan
from tests.device.test_flax_examples import of_sequences
from tests.support import flax_examples as ex
from tests.support.exact import bits, config, problem, train
from tests.support.trainers import use_devices


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


WIDE = (pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900))  # compiled for each device in turn


@pytest.mark.parametrize(
    ("precision", "name", "devices"),
    [
        ("bfloat16", "mlp", 3),
        pytest.param("float16", "mlp", 2, marks=pytest.mark.slow),
        *(
            pytest.param(precision, name, devices, marks=WIDE)
            for precision in ("float16", "bfloat16")
            for name, devices in (("cnn", 2), ("cnn", 3), ("gpt", 5))
        ),
    ],
)
def test_halves_give_the_same_bits(precision, name, devices, as_users_compile):
    one = problem(name)
    alone = train(one, 1, precision=precision)
    assert train(one, devices, precision=precision).bits == alone.bits
    assert alone.params != train(one, 1).params  # the option did something


def test_a_loss_scale_that_comes_down_comes_down_alike():
    # Large inputs overflow float16 at the first scales: steps are left out until one fits.
    one = problem("mlp")
    one = one._replace(data=ArrayDataset(one.data.inputs * 100, one.data.targets))
    alone = train(one, 1, precision="float16", epochs=4)
    assert train(one, 2, precision="float16", epochs=4).bits == alone.bits
    state = jax.tree.leaves(alone.end.state.sync)
    assert all(np.isfinite(leaf).all() for leaf in state)


SAMPLES = 45  # steps of 24 and 21: of 8 parts three samples, or two; 3 devices hold two parts or three


def seq2seq():
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, ex.VOCAB, (SAMPLES, ex.LENGTH)).astype(np.int32)
    lengths = rng.integers(1, ex.LENGTH, SAMPLES).astype(np.int32)
    inputs = ex.one_hot(tokens), ex.one_hot(tokens[:, ::-1])
    targets = {"tokens": tokens[:, ::-1], "length": lengths}
    return ex.Seq2seq(), (of_sequences, cx.AdamOptimizer(0.01)), inputs, targets


def gan_of_terms():
    pixels = np.random.default_rng(5).uniform(size=(SAMPLES, 64)).astype(np.float32)
    return gan.Gan(), (gan.task(pixels.mean(0)),), pixels, pixels


@pytest.mark.slow
@pytest.mark.parametrize("made", [seq2seq, gan_of_terms])
def test_other_devices_leave_the_bits_of_one(made):
    found = {}
    with jax.numpy_rank_promotion("allow"):
        for devices, mode in ((1, "exact"), (3, "exact"), *([(3, "none")] if made is gan_of_terms else [])):
            use_devices(devices)
            model, given, inputs, targets = made()
            trainer = cx.distributed.DistributedTrainer(model, *given)
            clip = {"max_grad_norm": 1.0 if made is seq2seq else None}
            plan = {"global_batch_size": 24, "verbose": False, "checkpoint_every_n_epochs": 0, "epochs": 2}
            trainer.fit(inputs, targets, config(reproducibility=mode, **plan, **clip))
            found[devices, mode] = bits(trainer)
            assert np.isfinite(trainer.history.train_losses).all()
    assert found[1, "exact"] == found[3, "exact"]
    if made is gan_of_terms:
        assert found[3, "none"]["values"] != found[3, "exact"]["values"]  # the comparison sees another order
