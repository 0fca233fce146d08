"""Computes with this version what version 0.2.0 wrote for a SequentialModel into sequential_v1.

That folder has a model file, a checkpoint after one epoch, and their numbers, from programs that were
compiled with the options of the tests.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

import cyxjax as cx
from cyxjax.core.model.adapter import adapt

FOLDER = Path(__file__).with_name("sequential_v1")
INPUTS = {  # for each network of the registry: options and one sample
    "mlp": ({}, np.zeros((1, 8, 8), np.float32)),
    "cnn": ({}, np.zeros((1, 8, 8), np.float32)),
    "resnet18": ({"width": 4, "small_images": True}, np.zeros((1, 8, 8, 3), np.float32)),
    "resnet50": ({"width": 2, "small_images": True}, np.zeros((1, 8, 8, 3), np.float32)),
    "vae": ({}, np.zeros((1, 8, 8), np.float32)),
    "gpt": ({"vocab_size": 11, "context_length": 4, "width": 8, "num_heads": 2}, np.zeros((1, 4), np.int32)),
}
_rng = np.random.default_rng(0)
X, Y = _rng.normal(size=(24, 6, 6)).astype(np.float32), _rng.integers(0, 3, 24).astype(np.int32)


def every_layer() -> cx.SequentialModel:
    """A model with all layers that have values or random draws."""
    model = cx.SequentialModel([cx.ReshapeModule((6, 6, 1)), cx.Conv2DModule(1, 4, 3)])
    model.add(cx.BatchNormModule(4)).add(cx.ReLUModule()).add(cx.GroupNormModule(2, 4))
    model.add(cx.FlattenModule()).add(cx.LinearModule(64, 5)).add(cx.LayerNormModule(5))
    return model.add(cx.DropoutModule(0.25)).add(cx.LinearModule(5, 3, bias=False)).add(cx.TanhModule())


def tokens() -> cx.SequentialModel:
    return cx.SequentialModel([cx.EmbeddingModule(7, 3), cx.LinearModule(3, 2)], seed=5)


def digest(tree: object) -> str:
    """A digest of the bits of all leaves."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def trainer(model: cx.SequentialModel):
    return cx.distributed.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1, momentum=0.9))


def config(epochs: int, **more: object):
    values = {"batch_size": 4, "verbose": False, "checkpoint_every_n_epochs": 0} | more
    return cx.distributed.DistributedTrainingConfig(epochs=epochs, **values)


def first_values(names: Iterable[str] = tuple(INPUTS)) -> dict[str, str]:
    """Digests of the initial (parameters, model state) of the SequentialModels and the networks `names`."""
    drawn = {
        f"sequential drawn by itself {name}": digest((model.parameters(), model.model_state()))
        for name, model in (("every_layer", every_layer()), ("tokens", tokens()))
    }
    drawn["sequential drawn by training"] = digest(adapt(every_layer()).init(jax.random.key(42), X[:1]))
    for name in names:
        options, sample = INPUTS[name]
        drawn[name] = digest(adapt(cx.get_model(name)(**options)).init(jax.random.key(42), sample))
    return drawn


def trained_numbers() -> dict[str, object]:
    """Losses of a trainer, and parameters after the torch-like loop."""
    model = every_layer()
    losses = trainer(model).fit(X, Y, config(2)).train_losses
    ddp, optimizer = cx.distributed.DistributedDataParallel(every_layer()), cx.SGDOptimizer(0.1)
    for rows in (slice(0, 8), slice(8, 16)):
        ddp.loss(cx.CrossEntropyLoss(), ddp(X[rows]), Y[rows]).backward()
        ddp.update_parameters(optimizer)
    params = jax.tree.leaves(ddp.state_dict()["params"])
    return {"losses": losses, "loop": np.concatenate([np.ravel(leaf) for leaf in params]).tolist()}
