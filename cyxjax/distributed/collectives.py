"""Collectives on per-process values: any tree of arrays, numbers and booleans.

A collective returns its result: `x = all_reduce(x)`. Written as a statement, as in torch, `all_reduce(x)`
fills a writable numpy array and raises DataError for any other value (`payload.py`); torch's lists are filled
too, `all_gather(out_list, x)`, `scatter(x, list_or_None, src)`. In a group of one, each call returns the
result for a single rank.

All raise GroupError before `init_process_group`, or naming the ranks that do not arrive in time (NCCL_TIMEOUT
seconds; unset, ten minutes or the group's timeout if longer); DesyncError, on every rank, naming the ranks
whose call, shapes or dtypes differ.
"""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from operator import methodcaller
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core import collectives
from cyxjax.core.mesh import build_mesh
from cyxjax.core.trees import PyTree
from cyxjax.data.streams import packed, unpacked
from cyxjax.distributed import process_group
from cyxjax.distributed.agreement import agree, leaf_type
from cyxjax.distributed.payload import (
    as_arrays,
    fill,
    fill_list,
    is_wide,
    pack,
    target_in_place,
    thrown_away,
    unpack,
    zeros,
)
from cyxjax.errors import ConfigError


class ReduceOp(StrEnum):
    """How ranks' values are reduced. AVG of integers is float32; SUM of booleans is "any", PRODUCT "all"."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"


def all_reduce(x: PyTree, op: ReduceOp = ReduceOp.SUM) -> PyTree:
    """`op` of every rank's `x`, on every rank; shapes and dtypes as `x` (see ReduceOp)."""
    target = _target(x, "x = all_reduce(x)")
    return fill(target, _reduced(ReduceOp(op), x, f"all_reduce({ReduceOp(op).name})"))


def reduce_tensor(x: PyTree) -> PyTree:
    """The mean of `x` over ranks."""
    target = _target(x, "x = reduce_tensor(x)")
    return fill(target, _reduced(ReduceOp.AVG, x, "all_reduce(AVG)"))


def reduce(x: PyTree, dst: int = 0, op: ReduceOp = ReduceOp.SUM) -> PyTree | None:
    """`op` of every rank's `x` on rank `dst`, None on the others. Costs what `all_reduce` does."""
    target = _target(x, f"x = reduce(x, {dst})")
    reduced = _reduced(ReduceOp(op), x, f"reduce({ReduceOp(op).name}, dst={_rank(dst)})")
    return fill(target, reduced) if process_group.get_rank() == dst else None


def broadcast(x: PyTree, src: int = 0) -> PyTree:
    """Rank `src`'s `x`, bit for bit, on every rank; on the others `x` gives only shapes and dtypes."""
    target = _target(x, f"x = broadcast(x, {src})")
    x = as_arrays(x)
    agree(process_group.current(), f"broadcast(src={_rank(src)})", x)
    return fill(target, _from(src, x))


def all_gather(x: PyTree, *value: PyTree) -> list[PyTree]:
    """Every rank's `x`, by rank, on every rank. All must have the same shapes.

    torch's form, all_gather(out_list, x), fills the list too.
    """
    rows = _gathered(value[0] if value else x, "all_gather")
    if value:
        fill_list(x, rows)
    return rows


def gather(x: PyTree, dst: int = 0) -> list[PyTree] | None:
    """Every rank's `x`, by rank, on rank `dst`; None on the others. Costs what `all_gather` does."""
    rows = _gathered(x, f"gather(dst={_rank(dst)})")
    return rows if process_group.get_rank() == dst else None


def scatter(xs: Any = None, scatter_list: Any = None, src: int = 0) -> PyTree:
    """The item of rank `src`'s list that belongs to this rank: `scatter(list_or_None, src)`.

    Trees may hold only dicts, lists and tuples: ranks without the list receive its structure from `src`.
    torch's form, scatter(x, list_or_None, src), fills the numpy array x.
    """
    if isinstance(scatter_list, int):
        scatter_list, src = None, scatter_list
    if not isinstance(xs, np.ndarray) and scatter_list is None:
        return _scattered(xs, src)
    return fill(target_in_place(xs, "x = scatter(list, src)"), _scattered(scatter_list, src))


def _scattered(xs: list[PyTree] | None, src: int) -> PyTree:
    """Raises: ValueError on rank `src` unless its list has one item per rank, all of the same shapes."""
    group = process_group.current()
    rank, world_size = group.topology.rank, group.topology.world_size
    stacked = form = None
    if rank == _rank(src):
        items = [item for _, item in zip(range(world_size), xs or (), strict=True)]
        stacked = jax.tree.map(lambda *a: np.stack(a), *items)
        form = packed(jax.tree.map(leaf_type, stacked))
    forms = agree(group, f"scatter(src={src})", note=form)
    whole = _from(src, jax.tree.map(zeros, unpacked(forms[src])) if stacked is None else stacked)
    return jax.tree.map(lambda a: a[rank], whole)


def reduce_scatter(xs: list[PyTree], op: ReduceOp = ReduceOp.SUM) -> PyTree:
    """`op` over ranks of the item each rank's list holds for this rank; one item per rank."""
    rows = _swapped(xs, f"reduce_scatter({ReduceOp(op).name})")
    return jax.tree.map(lambda *a: _reduce_here(a, ReduceOp(op)), *rows)


def all_to_all(xs: list[PyTree]) -> list[PyTree]:
    """What every rank's list holds for this rank, by rank; one item per rank, all of the same shape."""
    return _swapped(xs, "all_to_all")


def barrier(name: str | None = None, timeout: Any = None) -> None:
    """Returns once every rank has called it. timeout: seconds or a timedelta.

    Raises: GroupError naming the ranks that are missing; DesyncError if `name` differs between ranks.
    """
    timeout_s = None if timeout is None else process_group.seconds(timeout)
    agree(process_group.current(), "barrier" if name is None else f"barrier({name!r})", timeout_s=timeout_s)


def broadcast_object(value: Any = None, src: int = 0) -> Any:
    """Rank `src`'s `value` on every rank, sent as JSON, never pickle: tuples and arrays become lists.

    Keys become strings, numbers of numpy and jax those of Python.
    """
    data = _to_json(value if process_group.get_rank() == _rank(src) else None)
    sizes = agree(process_group.current(), f"broadcast_object(src={src})", note=data.size)
    return _from_json(_from(src, np.resize(data, sizes[src])))


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's `value`, by rank, on every rank, sent as JSON; sizes may differ."""
    data = _to_json(value)
    sizes = agree(process_group.current(), "all_gather_object", note=data.size)
    rows = _rows(np.resize(data, max(sizes)))
    return [_from_json(np.asarray(row)[:size]) for row, size in zip(rows, sizes, strict=True)]


def _target(x: PyTree, call: str) -> PyTree | None:
    """Where to write the result: into `x` if the caller of our caller discards it; None if it is used.

    call: the correct call, for the message. Raises: DataError for a value that cannot be filled.
    """
    process_group.current()  # without a group, raise that error first
    frame = sys._getframe(2)
    return target_in_place(x, call) if thrown_away(frame.f_code, frame.f_lasti) else None


# ---- how values move ----------------------------------------------------------------------------------


def _moved(x: PyTree, build: Callable[[Mesh], Callable]) -> Any:
    """The result, on this process, of the program `build(mesh)` on all ranks' `x`."""
    first: dict[int, jax.Device] = {}  # one device of each process
    for device in process_group.current().mesh.devices.flat:
        first.setdefault(device.process_index, device)
    mesh = build_mesh(list(first.values()))
    made = build(mesh)(collectives.put_row(mesh, first[jax.process_index()], x))
    return jax.tree.map(lambda a: a.addressable_data(0), made)


def _from(src: int, x: PyTree) -> PyTree:
    return unpack(_moved(pack(x), lambda mesh: collectives.build_broadcast(mesh, src)), x)


def _gathered(x: PyTree, call: str) -> list[PyTree]:
    x = as_arrays(x)
    agree(process_group.current(), call, x)
    return _rows(x)


def _rows(x: PyTree) -> list[PyTree]:
    return [unpack(row, x) for row in _moved(pack(x), collectives.build_all_gather)]


def _reduced(op: ReduceOp, x: PyTree, call: str) -> PyTree:
    x = as_arrays(x)
    agree(process_group.current(), call, x)
    leaves, tree = jax.tree.flatten(x)
    narrow = {i: a for i, a in enumerate(leaves) if not is_wide(a)}
    wide = {i: a for i, a in enumerate(leaves) if is_wide(a)}
    done = _moved(narrow, lambda mesh: collectives.build_reduce(mesh, op.value)) if narrow else {}
    if wide:
        done |= jax.tree.map(lambda *a: _reduce_here(a, op), *_rows(wide))
    return jax.tree.unflatten(tree, [done[i] for i in range(len(leaves))])


def _reduce_here(rows: tuple[Any, ...], op: ReduceOp) -> Any:
    """`op` over arrays that are all on this process."""
    if is_wide(rows[0]):
        return collectives.reduce_stack(np.stack(rows), op.value, np)
    return collectives.reduce_stack(jax.numpy.stack(rows), op.value)


def _swapped(xs: list[PyTree], call: str) -> list[PyTree]:
    items = as_arrays(list(xs))
    agree(process_group.current(), call, items)
    made = _moved(pack(items), collectives.build_all_to_all)
    return unpack(jax.tree.map(lambda a: a[0], made), items)


def _rank(rank: int) -> int:
    """`rank`. Raises: ConfigError for a rank that does not exist."""
    world_size = process_group.get_world_size()
    if not 0 <= rank < world_size:
        raise ConfigError(f"There is no rank {rank}. HINT: ranks here are 0 to {world_size - 1}.")
    return rank


def _to_json(value: Any) -> np.ndarray:
    """UTF-8 as uint8 (n,). Raises: AttributeError for what is neither plain nor a number or array."""
    return np.frombuffer(json.dumps(value, default=methodcaller("tolist")).encode(), np.uint8)


def _from_json(data: Any) -> Any:
    return json.loads(np.asarray(data).tobytes())
