"""`cx.testing`, for tests of your own training code: ranks on this machine, several devices in one process,
and a check that several devices train a model as one does.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from cyxjax.distributed import process_group
from cyxjax.distributed.spawning import Spawned, spawn
from cyxjax.errors import SpawnError
from cyxjax.launch.backend.jax_private import backend_runs

PyTree = Any
_MOST = 8  # CPU devices that jax is started with, so that a later test may use more than an earlier one
_SHOWN = 3


@contextmanager
def devices(count: int) -> Iterator[None]:
    """A block in which this process is a group of one with `count` devices, virtual ones on a CPU.

    jax starts with at least 8 CPU devices at its first use, and keeps that number.
    Raises: GroupError if jax has started with fewer than `count`.
    """
    process_group.finalize()
    process_group.init(cpu_devices=None if backend_runs() else max(_MOST, count))
    try:
        process_group.narrow(count)
        yield
    finally:
        process_group.finalize()


def run_ranks(
    num_ranks: int, fn: Callable[..., Any], *args: Any, devices: int = 1, timeout_s: float = 300.0
) -> list[Any]:
    """What `fn(*args)` returns in each of `num_ranks` new processes of one group, by rank.

    fn: a function of a module, not of a notebook; it returns JSON values and arrays (tuples become lists).
    devices: virtual CPU devices of each rank.
    Raises: SpawnError with the first failed rank's traceback, also after `timeout_s`; no process is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = spawn(_rank, (fn, args, devices, folder), num_ranks, join=False)
        assert isinstance(running, Spawned)
        try:
            if not running.join(timeout_s):
                raise SpawnError(-1, f"{fn.__name__}: no end within {timeout_s:g} s. HINT: raise timeout_s.")
        finally:
            running.stop()
        texts = [Path(folder, str(rank)).read_text() for rank in range(num_ranks)]
    return [json.loads(text, object_hook=_decoded) for text in texts]


def _rank(rank: int, world_size: int, fn: Callable, args: tuple, devices: int, folder: str) -> None:
    process_group.init(cpu_devices=devices * world_size)
    result = fn(*args)
    Path(folder, str(rank)).write_text(json.dumps(result, default=_encoded))


def _encoded(value: Any) -> Any:
    array = np.asarray(value)
    return {"__array__": [str(array.dtype), array.shape, array.tobytes().hex()]}


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() != {"__array__"}:
        return value
    dtype, shape, data = value["__array__"]
    return np.frombuffer(bytearray.fromhex(data), jnp.dtype(dtype)).reshape(shape)


def check_replicas(
    model: Any,
    loss_fn: Any,
    *data: Any,
    optimizer: Any = None,
    replicas: int = 4,
    batch_size: int = 8,
    steps: int = 3,
    tolerance: float = 1e-4,
    **config: Any,
) -> None:
    """Returns if `replicas` devices train `model` as one device does, on the same global batches.

    data: as for `fit`. batch_size: samples per step, over all devices. optimizer: SGD by default; a rule that
    divides by a gradient's magnitude (Adam) amplifies rounding. config: further keys, such as
    `sync_batchnorm=True`. tolerance: of a parameter's difference, relative to how far training moved it.
    Raises: AssertionError naming the parameter that differs most, and where to look.
    """
    one, many = (
        _trained(model, loss_fn, data, optimizer, count, batch_size, steps, config) for count in (1, replicas)
    )
    different = sorted(_differences(one, many, tolerance), reverse=True)
    if different:
        shown = "; ".join(f"{name} by {by:.2g} of how far it moved" for by, name in different[:_SHOWN])
        raise AssertionError(
            f"{replicas} devices and one train different models: {shown} ({len(different)} of "
            f"{len(one[0])} differ). "
            "HINT: check BatchNorm over parts of a batch (sync_batchnorm=True), dropout (its masks depend on "
            "the number of devices), and whether the output for a sample depends on the other samples."
        )


def _trained(
    model: Any, loss_fn: Any, data: Any, optimizer: Any, count: int, batch_size: int, steps: int, config: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(parameters before, after), by name."""
    from cyxjax.config.run import DistributedTrainingConfig
    from cyxjax.core.model.adapter import adapt
    from cyxjax.core.trees import named_leaves
    from cyxjax.train.start.optimizers import SGDOptimizer
    from cyxjax.train.trainer import DistributedTrainer

    quiet = {"checkpoint_every_n_epochs": 0, "verbose": False, "evaluate_every_n_epochs": 0}
    wanted = {"global_batch_size": batch_size, "epochs": steps, "max_steps": steps} | quiet | config
    with devices(count):
        # As functions: a model that holds values is not changed, and starts twice from the same ones.
        trainer = DistributedTrainer(adapt(model), loss_fn, optimizer or SGDOptimizer(0.1))
        plan = trainer.prepare(*data, config=DistributedTrainingConfig(**wanted))
        before = {name: np.array(leaf) for name, leaf in named_leaves(trainer.params)}
        trainer.fit_prepared(plan)
        return before, {name: np.array(leaf) for name, leaf in named_leaves(trainer.params)}


def _differences(one: Any, many: Any, tolerance: float) -> Iterator[tuple[float, str]]:
    """(how much, name) of the parameters that differ."""
    before, after = one
    most = max((np.abs(after[name] - leaf).max(initial=0.0) for name, leaf in before.items()), default=0.0)
    for name, wanted in after.items():
        moved = np.abs(wanted - before[name]).max(initial=0.0)
        gap = np.abs(many[1][name] - wanted).max(initial=0.0)
        # What has no gradient (a bias before a BatchNorm) moves by rounding alone, differently each time.
        rounding = 1e-6 * max(np.abs(wanted).max(initial=0.0), most)
        if not gap <= tolerance * moved + rounding:  # also where one is not a number
            yield float(gap / max(moved, 1e-30)), name
