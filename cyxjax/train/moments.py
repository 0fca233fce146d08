"""A moment of a run as what a checkpoint stores beside its arrays, and back."""

from typing import Any

import jax
import numpy as np

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.core.step import TrainState
from cyxjax.errors import CheckpointError
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.loop import Moment, Position

PyTree = Any


def to_meta(
    moment: Moment, history: DistributedTrainingHistory, config: dict[str, Any], inputs: PyTree
) -> dict[str, Any]:
    """JSON values: position, sums of the epoch under way, history, configuration, input shapes."""
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): [list(leaf.shape[1:]), str(leaf.dtype)]
        for path, leaf in jax.tree_util.tree_flatten_with_path(inputs)[0]
    }
    return {
        "position": dict(moment.position._asdict()),
        "sums": moment.sums.tolist(),
        "history": history.to_dict(),
        "config": config,
        "inputs": shapes,
    }


def from_meta(meta: dict[str, Any], state: TrainState) -> tuple[Moment, DistributedTrainingHistory]:
    """The moment and history `to_meta` described. Raises: CheckpointError if they are not there."""
    try:
        position = Position(**{name: int(value) for name, value in meta["position"].items()})
        history = DistributedTrainingHistory.from_dict(meta["history"])
        return Moment(position, state, np.array(meta["sums"], np.float64)), history
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(
            f"the checkpoint was not written by a trainer ({type(err).__name__}: {err}). "
            "HINT: name a folder that fit or save_checkpoint wrote."
        ) from err


def latest_meta(checkpointer: Checkpointer) -> dict[str, Any]:
    """What the newest good step says of itself. Raises: CheckpointError if there is none."""
    step = checkpointer.latest_step()
    if step is None:
        raise CheckpointError(
            f"{checkpointer.directory} holds no good checkpoint. HINT: look with `cyxjax checkpoint verify`."
        )
    return read_manifest(step_folder(checkpointer.directory, step)).meta


def stored_inputs(meta: dict[str, Any]) -> PyTree:
    """One sample of zeros, shaped like the inputs the checkpoint was trained on."""
    leaves = {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in meta["inputs"].items()}
    if set(leaves) == {""}:
        return leaves[""]
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree
