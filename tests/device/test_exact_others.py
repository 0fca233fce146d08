"""`reproducibility: exact` for losses and models of others' kinds: one set of bits on any devices.

A loss that weighs its tokens, over an LSTM; and two optimizers in turns, over noise drawn in the model.
"""

import jax
import numpy as np
import pytest

import cyxjax as cx
from scripts.examples import gan
from tests.device.test_exact import numbers_are_promoted  # noqa: F401 (a fixture for every test here)
from tests.device.test_exact_trainer import bits
from tests.device.test_flax_examples import of_sequences
from tests.support import flax_examples as ex
from tests.support.exact import config
from tests.support.trainers import use_devices

pytestmark = pytest.mark.slow
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
