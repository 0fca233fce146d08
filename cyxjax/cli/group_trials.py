"""The trials of `cyxjax doctor` in a group: files in the run folder, all-reduces, two training steps."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.cli.machine_checks import Check
from cyxjax.files import flock_now, try_flock, write_whole

_SIZES = (4, 64 << 10, 1 << 20, 16 << 20)  # bytes of the arrays that are reduced
_TIMES = 7  # each; the median counts


@contextmanager
def own_file(folder: Path, rank: int) -> Iterator[tuple[str, str]]:
    """(what went wrong or "", name of a file of ours in `folder`), written as checkpoints are, and locked.

    A folder that was not there is made, and removed again where nothing else came into it.
    """
    made = [p for p in (folder.absolute(), *folder.absolute().parents) if not p.exists()]
    name = f".doctor-{os.uname().nodename}-{os.getpid()}-{rank}"
    error, held = "", -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # 106 kB: more than a file system keeps beside the name
        write_whole(folder / name, b"cyxjax doctor" * 8192, mode=0o600)
        held = os.open(folder / name, os.O_RDWR)
        flock_now(held)
    except OSError as err:
        error = err.strerror or str(err)
    try:
        yield error, name
    finally:
        if held >= 0:
            os.close(held)
        (folder / name).unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def others_files(folder: Path, names: Sequence[str], rank: int) -> dict[str, list[int]]:
    """unseen: ranks whose files are not in `folder` as seen here; unlocked: whose locks do not hold."""
    unseen, unlocked = [], []
    for other, name in enumerate(names):
        if other == rank:
            continue
        try:
            theirs = os.open(folder / name, os.O_RDWR)
        except OSError:
            unseen.append(other)
            continue
        if try_flock(theirs):
            unlocked.append(other)
        os.close(theirs)
    return {"unseen": unseen, "unlocked": unlocked}


def wires(group: Any) -> Iterator[Check]:
    """Latency and bandwidth of the all-reduce that training uses, by size."""
    import jax
    from jax.sharding import PartitionSpec

    from cyxjax.core.mesh import PER_REPLICA, local_replicas, put_rows
    from cyxjax.core.replica import psum, sync_map

    mesh = group.mesh
    reduce = jax.jit(sync_map(lambda rows: psum(rows[0]), mesh, PER_REPLICA, PartitionSpec()))
    times = []
    for size in _SIZES:
        rows = put_rows(mesh, np.ones((len(local_replicas(mesh)), size // 4), np.float32))
        total = np.asarray(reduce(rows).addressable_data(0))
        if not (total == mesh.size).all():
            wrong = f"{mesh.size} ones add up to {total[total != mesh.size][0]:g} ({size:,} bytes)"
            yield Check("FAIL", "wires", f"{wrong}. HINT: check the network cards and drivers of the hosts.")
            return
        spent_s = statistics.median(_timed(reduce, rows) for _ in range(_TIMES))
        times.append(f"{_short(size)} {1e3 * spent_s:.2f} ms ({size / spent_s / 1e6:,.1f} MB/s)")
    yield Check("ok", "wires", f"all-reduce over {group.backend}: {', '.join(times)}")


def _timed(reduce: Any, rows: Any) -> float:
    began = time.perf_counter()
    reduce(rows).block_until_ready()
    return time.perf_counter() - began


def _short(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1024 else f"{size} B"


def two_steps(group: Any) -> Check:
    """Two steps of a small model on all devices, against one device with the whole batches."""
    import jax
    from jax.sharding import Mesh

    from cyxjax.core.mesh import AXIS, local_value
    from cyxjax.core.trees import named_leaves

    alone = Mesh(np.array(jax.local_devices()[:1]), (AXIS,))
    many, one = (jax.tree.map(local_value, _trained(mesh, group.mesh.size)) for mesh in (group.mesh, alone))
    pairs = zip(named_leaves(many), named_leaves(one), strict=True)
    gap, name = max((float(np.abs(a - b).max()), name) for (name, a), (_, b) in pairs)
    if not gap < 1e-5:  # sums in another order, of numbers near 1: some 1e-7
        return Check(
            "FAIL",
            "training",
            f"{group.mesh.size} devices train other parameters than one: {name} by {gap:.2g}. "
            "HINT: run again; if it stays, try --backend gloo, then look at the drivers.",
        )
    return Check("ok", "training", f"two steps on {group.mesh.size} devices are those of one (to {gap:.1g})")


def _trained(mesh: Any, replicas: int) -> Any:
    """Parameters after two steps of 2 samples a replica of the whole group, on `mesh`."""
    import jax
    import optax

    from cyxjax.core.losses import CrossEntropyLoss, as_per_example
    from cyxjax.core.mesh import local_replicas
    from cyxjax.core.model.adapter import adapt
    from cyxjax.core.step import build_train_step, init_state
    from cyxjax.data.batches import BatchPlan, read_batch
    from cyxjax.data.order import Order
    from cyxjax.data.sources import ArrayDataset
    from cyxjax.models import get_model
    from cyxjax.sync.mean import mean
    from cyxjax.train.feeding.placing import RowPlacer

    samples = 4 * replicas
    inputs = np.random.default_rng(0).normal(size=(samples, 8)).astype(np.float32)
    data = ArrayDataset(inputs, (np.arange(samples) % 3).astype(np.int32))
    fns = adapt(get_model("mlp")(hidden=(16,), num_classes=3))
    sync, placer = mean(optax.sgd(0.1)), RowPlacer(mesh)
    state = init_state(sync, mesh, *fns.init(jax.random.key(0), inputs[:1]), 0)
    step = build_train_step(fns, as_per_example(CrossEntropyLoss()), sync, mesh)
    plan = BatchPlan(samples, 2 * replicas // mesh.size, mesh.size)
    for number in range(plan.num_steps):
        state, _ = step(
            state, placer.put(read_batch(data, Order(samples), plan, local_replicas(mesh), number))
        )
    return state.params
