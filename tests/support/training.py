"""A small experiment that trains in processes (jobs.py), and comparisons of its results."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.checkpoint.restoring import open_step
from cyxjax.cli import audit
from cyxjax.cli.checkpoint import run_of
from cyxjax.cli.hash import compare

SAMPLES, STEPS_PER_EPOCH, EPOCHS = 90, 6, 3  # 16 samples per step: the last one of an epoch has 10
LAST = EPOCHS * STEPS_PER_EPOCH  # the last step
# Draws random numbers, as training that goes on must do as well.
DROPPING = {"model": {"name": "mlp", "options": {"hidden": [16], "dropout": 0.2}}}


def write_experiment(folder: Path, **changes: Any) -> Path:
    """A configuration file of one linear layer on 90 samples, saved every 4 steps; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    shapes = {"train": SAMPLES, "val": 12, "test": 6}
    arrays = {f"x_{part}": rng.normal(size=(n, 6)).astype(np.float32) for part, n in shapes.items()}
    arrays |= {f"y_{part}": rng.integers(0, 3, n).astype(np.int32) for part, n in shapes.items()}
    np.savez(folder / "data.npz", **arrays)
    values = {
        "run_dir": str(folder / "run"),
        "cpu_devices": 2,
        "epochs": EPOCHS,
        "global_batch_size": 16,
        "model": {"name": "mlp", "options": {"hidden": []}},
        "data": {"name": "npz", "root": str(folder / "data.npz")},
        "optimizer": {"name": "adam", "lr": 0.01},
        "schedule": {"name": "cosine"},
        "checkpoint_every_n_steps": 4,
        "steps_in_flight": 2,
        "log_every_n_batches": 1,
        "sentinel_every_n_steps": 0,
        "report": False,
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def begun_by(config: Path, other: Path, step: int) -> None:
    """Makes the run of `config` a copy of `other`'s that has no checkpoint after `step`."""
    shutil.copytree(other.parent / "run", config.parent / "run")
    for later in list_steps(checkpoints(config)):
        if later > step:
            shutil.rmtree(step_folder(checkpoints(config), later))


def checkpoints(config: Path) -> Path:
    return config.parent / "run" / "checkpoints"


def newest_step(config: Path) -> int:
    return max(list_steps(checkpoints(config)), default=-1)


def leaves(config: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, by name."""
    manifest, stored = open_step(checkpoints(config), newest_step(config))
    return {leaf.name: stored.whole(leaf.name) for leaf in manifest.leaves}


def digests(config: Path) -> dict[str, str]:
    """Dtype and SHA-256 of each array of the newest checkpoint, by name."""
    found = leaves(config).items()
    return {name: f"{array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()}" for name, array in found}


def assert_same_run(config: Path, other: Path) -> None:
    """Checks that both runs have equal last steps, bits and curves, and that the audit of `config` passes."""
    assert audit.main([str(config.parent / "run")]) == 0
    assert newest_step(config) == newest_step(other)
    assert curves(config) == curves(other)
    assert digests(config) == digests(other)


def assert_same_hashes(run: Path, other: Path) -> None:
    """Checks that two run folders have the last step and all hashes in common, as `cyxjax hash` compares."""
    runs = [run_of(run), run_of(other)]
    lines, equal = compare(*runs)
    assert equal, lines
    last, its_last = (list_steps(one.checkpoints)[-1] for one in runs)
    assert last == its_last


def curves(config: Path) -> dict[str, Any]:
    """The losses and accuracies in the newest checkpoint's history, without times."""
    history = read_manifest(step_folder(checkpoints(config), newest_step(config))).meta["history"]
    return {name: values for name, values in history.items() if isinstance(values, list)}
