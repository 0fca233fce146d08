"""Trains a small experiment in processes that end at chosen moments, and compares what is left."""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.checkpoint.store import StepStore

JOB = Path(__file__).with_name("training_job.py")
LIMIT_S = 90  # for a run whose bound is seconds: the machine may be shared
SAMPLES, STEPS_PER_EPOCH, EPOCHS = 90, 6, 3  # 16 samples a step: the last of an epoch has 10


@dataclass
class Ended:
    """What the ranks of one run ended with. `text` is all they wrote."""

    codes: list[int]
    text: str


class Jobs:
    """Starts runs in a process that has loaded everything they need."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(JOB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
            | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )

    def run(self, config: Path, *argv: object, world: int = 1, fault: str = "") -> Ended:
        """Trains as `config` says, in `world` processes, and waits for the end of all."""
        self.start(config, *argv, world=world, fault=fault)
        return self.wait(config, world)

    def wait(self, config: Path, world: int) -> Ended:
        """The end of all ranks of the run that was started last."""
        log = config.with_suffix(".log")
        codes = self._ask("wait")
        texts = [Path(f"{log}.{rank}").read_text() for rank in range(world)]
        return Ended(codes, "".join(texts))

    def start(self, config: Path, *argv: object, world: int = 1, fault: str = "") -> list[int]:
        """The pids of a run that was started."""
        words = ["--config", str(config), *map(str, argv)]
        log = str(config.with_suffix(".log"))
        return self._ask({"argv": words, "ranks": world, "log": log, "fault": fault})

    def _ask(self, order: Any) -> list[int]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write((json.dumps(order) + "\n").encode())
        self._server.stdin.flush()
        if not select.select([self._server.stdout], [], [], LIMIT_S)[0]:
            os.killpg(self._server.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {LIMIT_S} s")
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()


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
    store, step = StepStore(checkpoints(config), is_writer=False), newest_step(config)
    return store.read(step, store.manifest(step))


def sha256_of(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(
            name.encode() + str(arrays[name].dtype).encode() + np.ascontiguousarray(arrays[name]).tobytes()
        )
    return digest.hexdigest()


def curves(config: Path) -> dict[str, Any]:
    """What the newest checkpoint's history says of losses and accuracies: no times."""
    history = read_manifest(step_folder(checkpoints(config), newest_step(config))).meta["history"]
    return {name: values for name, values in history.items() if isinstance(values, list)}
