"""Trains a small experiment in processes that end at chosen moments, and compares the results."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.checkpoint.restoring import open_step
from cyxjax.cli import audit
from cyxjax.errors import EXIT_OK
from tests.support import forked
from tests.support.programs import free_port
from tests.support.training_job import run_rank

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LIMIT_S = 90  # for a run that takes seconds: the machine may be shared
SAMPLES, STEPS_PER_EPOCH, EPOCHS = 90, 6, 3  # 16 samples per step: the last one of an epoch has 10
LAST = EPOCHS * STEPS_PER_EPOCH  # the last step


@dataclass
class Ended:
    """The exit codes of the ranks of one run. `text` is their output."""

    codes: list[int]
    text: str


class Jobs:
    """Starts runs in forked processes, which have everything they need loaded."""

    def __init__(self) -> None:
        self._forks, self._ranks, self._started = forked.server(), list[Any](), list[Any]()

    def run(
        self, config: Path, *argv: object, world: int = 1, fault: str = "", code: int | None = EXIT_OK
    ) -> Ended:
        """Trains `config` in `world` processes. code: the expected exit code of each; None: any."""
        self.start(config, *argv, world=world, fault=fault)
        ended = self.wait(config, world)
        assert code is None or set(ended.codes) == {code}, f"{ended.codes}: {ended.text}"
        return ended

    def start(self, config: Path, *argv: object, world: int = 1, fault: str = "") -> list[int]:
        """Starts a run; its pids."""
        dirty = ("NPROC", *PLACE)
        env = {k: v for k, v in os.environ.items() if k not in dirty} | {"JAX_PLATFORMS": "cpu"}
        port, words = free_port(), ["--config", str(config), *map(str, argv)]
        self._ranks = []
        for rank, log in enumerate(_logs(config, world)):
            log.unlink(missing_ok=True)
            values = (rank, world, rank, "127.0.0.1", port)
            place = {name: str(value) for name, value in zip(PLACE, values, strict=True)}
            arguments = (words, env | (place if world > 1 else {}), log, fault, rank)
            self._ranks.append(self._forks.Process(target=run_rank, args=arguments))
            self._ranks[-1].start()
            self._started.append(self._ranks[-1])
        return [rank.pid for rank in self._ranks]

    def wait(self, config: Path, world: int) -> Ended:
        """Waits until all ranks of the last started run have ended."""
        end = time.monotonic() + LIMIT_S
        for rank in self._ranks:
            rank.join(end - time.monotonic())
        late = [rank.pid for rank in self._ranks if rank.exitcode is None]
        _kill(self._ranks)
        text = "".join(log.read_text() for log in _logs(config, world))
        assert not late, f"still running after {LIMIT_S} s: {text}"
        return Ended([rank.exitcode for rank in self._ranks], text)

    def close(self) -> None:
        """Kills all started processes that still run."""
        _kill(self._started)


def _kill(ranks: list[Any]) -> None:
    for rank in ranks:
        rank.kill()
        rank.join()


def _logs(config: Path, world: int) -> list[Path]:
    return [config.with_suffix(f".log.{rank}") for rank in range(world)]


def write_experiment(folder: Path, **changes: Any) -> Path:
    """A configuration file of a network with dropout on 90 samples, saved every 4 steps; its path."""
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
        "model": {"name": "mlp", "options": {"hidden": [16], "dropout": 0.2}},
        "data": {"name": "npz", "root": str(folder / "data.npz")},
        "optimizer": {"name": "adam", "lr": 0.01},
        "schedule": {"name": "cosine"},
        "checkpoint_every_n_steps": 4,
        "steps_in_flight": 2,
        "log_every_n_batches": 1,
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def checkpoints(config: Path) -> Path:
    return config.parent / "run" / "checkpoints"


def newest_step(config: Path) -> int:
    return max(list_steps(checkpoints(config)), default=-1)


def leaves(config: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, by name."""
    manifest, stored = open_step(checkpoints(config), newest_step(config))
    return {leaf.name: stored.whole(leaf.name) for leaf in manifest.leaves}


def sha256_of(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(
            name.encode() + str(arrays[name].dtype).encode() + np.ascontiguousarray(arrays[name]).tobytes()
        )
    return digest.hexdigest()


def assert_same_run(config: Path, other: Path) -> None:
    """Checks that both runs have equal last steps, bits and curves, and that the audit of `config` passes."""
    assert audit.main([str(config.parent / "run")]) == 0
    assert newest_step(config) == newest_step(other)
    assert curves(config) == curves(other)
    assert sha256_of(leaves(config)) == sha256_of(leaves(other))


def curves(config: Path) -> dict[str, Any]:
    """The losses and accuracies in the newest checkpoint's history, without times."""
    history = read_manifest(step_folder(checkpoints(config), newest_step(config))).meta["history"]
    return {name: values for name, values in history.items() if isinstance(values, list)}
