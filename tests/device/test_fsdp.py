"""fsdp: the numbers of `mean`, with a part of the parameters on each replica."""

import jax
import numpy as np
import pytest
from flax import nnx

from cyxjax.core.model.adapter import adapt
from cyxjax.core.portable import build_draw, holds_values
from cyxjax.core.step import build_init
from tests.support.sharded import (
    IMAGES,
    MODELS,
    SETTINGS,
    Convolutional,
    Perceptron,
    assert_as_mean,
    assert_same,
    drawn,
    trained,
)

SLOW = pytest.mark.slow


# One row by default, one of each kind among the slow tests, and all of them in the wide tests.
# (The CNN: a checkpoint below. A transformer in float32: the GPT below.)
QUICK = [("crossed", 3, "clip-accumulation")]  # every kind of leaf, which 3 replicas do not divide
SAMPLE = [
    ("cnn", 2, "clip-accumulation"),
    ("nnx", 2, "skip"),
    ("nnx", 4, "average"),
    ("gpt", 8, "bfloat16"),
    ("nnx", 4, "zero2"),
]
TABLE = [(m, r, s) for m in ("cnn", "nnx", "gpt", "crossed") for r in (2, 4, 8) for s in SETTINGS]
REST = [row for row in TABLE if row not in QUICK + SAMPLE]


@pytest.mark.parametrize(
    ("model", "replicas", "settings"),
    [
        *QUICK,
        *(pytest.param(*row, marks=SLOW) for row in SAMPLE),
        *(pytest.param(*row, marks=[SLOW, pytest.mark.wide]) for row in REST),
    ],
)
@pytest.mark.usefixtures("as_users_promote")
def test_it_trains_evaluates_and_predicts_as_mean_does(model, replicas, settings):
    assert_as_mean(model, replicas, settings)


@SLOW
@pytest.mark.parametrize(("comm", "model"), [("zero1", "crossed"), ("fsdp", "pair")])
@pytest.mark.usefixtures("as_users_promote")
def test_every_kind_of_leaf_is_trained_as_by_mean(comm, model):
    assert_as_mean(model, 3, "plain", comm)


# The other strategies one after another, and in processes: tests/faults/test_resume.py.
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("fsdp", "mean"),
        *(
            pytest.param(*row, marks=[SLOW, pytest.mark.wide])
            for row in [("mean", "fsdp"), ("fsdp", "zero1")]
        ),
    ],
)
def test_a_checkpoint_goes_on_as_any_strategy(first, then, tmp_path):
    trained(first, "cnn", 4, tmp_path, epochs=1)
    assert_same(trained(then, "cnn", 4, tmp_path), trained("mean", "cnn", 4))


@SLOW
def test_adapters_are_multiplied_as_mean_does_it_where_the_model_computes_in_16_bits():
    """They used to be sent in float16, and their scaled gradients overflowed: steps were skipped."""
    options = {"precision": "float16", "lora": {"rank": 2}}
    one, other = trained("fsdp", "nnx", 2, **options), trained("mean", "nnx", 2, **options)
    assert one.history.skipped_steps == other.history.skipped_steps  # measured: 1, and 3 of fsdp before
    assert_same(one, other, {"rtol": 0, "atol": 2e-3})


def test_the_first_parameters_are_drawn_in_parts_and_are_those_of_mean():
    make, (inputs, _) = MODELS["cnn"]
    fns, sync, mesh = drawn(make(), inputs[:1])
    found = build_draw(fns, sync, mesh)(np.uint32(3), inputs[:1])
    whole = jax.tree.map(np.asarray, fns.init(jax.random.key(3), inputs[:1]))
    wanted = build_init(sync, mesh)(*whole, 3)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.sharding == b.sharding
        # The same draws; fusion saves one rounding (measured 6e-8 of numbers up to 1).
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7)


def test_a_model_born_with_values_keeps_them():
    x = np.ones((1, 36), np.float32)
    assert holds_values(adapt(Perceptron(nnx.Rngs(0))), x)
    assert not holds_values(adapt(Convolutional()), IMAGES[:1])
