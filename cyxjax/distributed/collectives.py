"""Collectives on per-process values: any tree of arrays, numbers and booleans.

Arrays are values: `x = all_reduce(x)` returns. As a statement, torch's habit, `all_reduce(x)` fills a numpy
array that may be written to, and refuses any other value (`in_place.py`); torch's lists are filled too,
`all_gather(out_list, x)`, `scatter(x, list_or_None, src)`. In a group of one each call gives what one rank
gives.

All raise GroupError before `init_process_group`, or naming the ranks that do not come (in time: NCCL_TIMEOUT
seconds, the group's timeout, or ten minutes); DesyncError, on every rank, naming ranks whose call, shapes or
dtypes differ; DataError, on every rank, for arguments that one of them cannot send.
"""

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core import collectives
from cyxjax.core.mesh import build_mesh
from cyxjax.core.trees import PyTree
from cyxjax.distributed import payload, process_group
from cyxjax.distributed.agreement import agree, describe
from cyxjax.distributed.in_place import fill, fill_list, target_in_place, target_of
from cyxjax.distributed.payload import as_arrays, is_wide, pack, unpack
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import ConfigError, DataError


class ReduceOp(StrEnum):
    """How values of ranks become one. AVG of integers is float32; SUM of booleans is "any", PRODUCT "all"."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"


def all_reduce(x: PyTree, op: ReduceOp = ReduceOp.SUM) -> PyTree:
    """`op` of every rank's `x`, on every rank; shapes and dtypes as `x` (see ReduceOp)."""
    target = _target(x, "x = all_reduce(x)")
    return fill(target, _reduced(_op(op), x, f"all_reduce({_op(op).name})"))


def reduce_tensor(x: PyTree) -> PyTree:
    """The mean of `x` over ranks."""
    target = _target(x, "x = reduce_tensor(x)")
    return fill(target, _reduced(ReduceOp.AVG, x, "all_reduce(AVG)"))


def reduce(x: PyTree, dst: int = 0, op: ReduceOp = ReduceOp.SUM) -> PyTree | None:
    """`op` of every rank's `x` on rank `dst`, None on the others. Costs what `all_reduce` does."""
    target = _target(x, f"x = reduce(x, {dst})")
    reduced = _reduced(_op(op), x, f"reduce({_op(op).name}, dst={_rank(dst, 'dst')})")
    return fill(target, reduced) if process_group.get_rank() == dst else None


def broadcast(x: PyTree, src: int = 0) -> PyTree:
    """Rank `src`'s `x`, bit for bit, on every rank; `x` elsewhere gives shapes and dtypes only."""
    target = _target(x, f"x = broadcast(x, {src})")
    x, problem = _checked(x)
    group = process_group.current()
    agree(group, f"broadcast(src={_rank(src, 'src')})", x, problem=problem)
    return fill(target, _moved(group, x, lambda mesh: collectives.build_broadcast(mesh, src)))


def all_gather(x: PyTree, *value: PyTree) -> list[PyTree]:
    """Every rank's `x`, by rank, on every rank. All must have the same shapes.

    torch's form, all_gather(out_list, x), fills the list too.
    """
    if not value:
        return _gathered(x, "all_gather")
    rows = _gathered(value[0], "all_gather")
    fill_list(x, rows, "all_gather(out_list, x)")
    return rows


def gather(x: PyTree, dst: int = 0) -> list[PyTree] | None:
    """Every rank's `x`, by rank, on rank `dst`; None on the others. Costs what `all_gather` does."""
    rows = _gathered(x, f"gather(dst={_rank(dst, 'dst')})")
    return rows if process_group.get_rank() == dst else None


def scatter(
    xs: Any = None, *args: Any, src: int | None = None, scatter_list: list[PyTree] | None = None
) -> PyTree:
    """The item of rank `src`'s list that belongs to this rank; the others pass None.

    Trees are made of dicts, lists and tuples here: ranks without the list learn its form from `src`.
    torch's form, scatter(x, list_or_None, src), fills the numpy array x.
    """
    numbers = [one for one in args if isinstance(one, int)]
    listed = [one for one in args if not isinstance(one, int)]
    src = src if src is not None else numbers[0] if numbers else 0
    if isinstance(xs, np.ndarray) or scatter_list is not None or listed:
        into = target_in_place(xs, "x = scatter(list, src)")
        return fill(
            into, _scattered(scatter_list if scatter_list is not None else (listed or [None])[0], src)
        )
    return _scattered(xs, src)


def _scattered(xs: list[PyTree] | None, src: int) -> PyTree:
    group = process_group.current()
    giving = group.topology.rank == _rank(src, "src")
    items, problem = _items(xs, group) if giving else ([], "")
    form, problem = payload.form_of(items[0], problem) if items else (None, problem)
    forms = agree(group, f"scatter(src={src})", note=form, problem=problem)
    if not giving:
        items = [payload.zeros_of_form(forms[src])] * group.topology.world_size
    return _moved(group, items, lambda mesh: collectives.build_broadcast(mesh, src))[group.topology.rank]


def reduce_scatter(xs: list[PyTree], op: ReduceOp = ReduceOp.SUM) -> PyTree:
    """`op` over ranks of the item each rank's list holds for this rank; one item a rank."""
    op = _op(op)
    rows = _swapped(xs, f"reduce_scatter({op.name})")
    return jax.tree.map(lambda *a: _reduce_here(a, op), *rows)


def all_to_all(xs: list[PyTree]) -> list[PyTree]:
    """What every rank's list holds for this rank, by rank; one item a rank, all of the same shape."""
    return _swapped(xs, "all_to_all")


def barrier(name: str | None = None, timeout: Any = None) -> None:
    """Returns once every rank is here. timeout: seconds or a timedelta.

    Raises: GroupError naming the ranks that are missing; DesyncError if `name` differs between ranks.
    """
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"timeout={timeout!r} must be positive. HINT: give seconds, such as timeout=60.")
    agree(process_group.current(), "barrier" if name is None else f"barrier({name!r})", timeout_s=seconds)


def broadcast_object(value: Any = None, src: int = 0) -> Any:
    """Rank `src`'s `value` on every rank, through JSON (so tuples become lists, keys texts); never pickle."""
    group = process_group.current()
    giving = group.topology.rank == _rank(src, "src")
    data, problem = _to_json(value if giving else None)
    sizes = agree(group, f"broadcast_object(src={src})", note=data.size, problem=problem)
    row = data if giving else np.zeros(sizes[src], np.uint8)
    return _from_json(_moved(group, row, lambda mesh: collectives.build_broadcast(mesh, src)))


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's `value`, by rank, on every rank, through JSON; sizes may differ."""
    group = process_group.current()
    data, problem = _to_json(value)
    sizes = agree(group, "all_gather_object", note=data.size, problem=problem)
    rows = _rows(group, np.resize(data, max(sizes)))
    return [_from_json(np.asarray(row)[:size]) for row, size in zip(rows, sizes, strict=True)]


def check_same(tree: PyTree, what: str) -> None:
    """Returns if all ranks pass the same leaves, shapes and dtypes; raises DesyncError naming the leaf."""
    agree(process_group.current(), what, tree)


def _target(x: PyTree, call: str) -> PyTree | None:
    """What the caller of our caller wants filled; see `in_place`."""
    process_group.current()  # without a group that is what is said
    return target_of(x, call, sys._getframe(2))


# ---- how values move ----------------------------------------------------------------------------------


def _mesh(group: ProcessGroup) -> tuple[Mesh, jax.Device]:
    """One device of each process, and ours among them."""
    first: dict[int, jax.Device] = {}
    for device in group.mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return build_mesh(list(first.values())), first[jax.process_index()]


def _moved(group: ProcessGroup, x: PyTree, build: Callable[[Mesh], Callable]) -> Any:
    """What program `build(mesh)` makes of all ranks' `x`, of the same form as `x`, on this process."""
    mesh, device = _mesh(group)
    made = build(mesh)(collectives.put_row(mesh, device, pack(x)))
    return unpack(jax.tree.map(lambda a: a.addressable_data(0), made), x)


def _gathered(x: PyTree, call: str) -> list[PyTree]:
    x, problem = _checked(x)
    group = process_group.current()
    agree(group, call, x, problem=problem)
    return _rows(group, x)


def _rows(group: ProcessGroup, x: PyTree) -> list[PyTree]:
    mesh, device = _mesh(group)
    rows = collectives.build_all_gather(mesh)(collectives.put_row(mesh, device, pack(x)))
    return [unpack(jax.tree.map(lambda a: a.addressable_data(0), row), x) for row in rows]


def _reduced(op: ReduceOp, x: PyTree, call: str) -> PyTree:
    x, problem = _checked(x)
    group = process_group.current()
    agree(group, call, x, problem=problem)
    mesh, device = _mesh(group)
    leaves, tree = jax.tree.flatten(x)
    narrow = [a for a in leaves if not is_wide(a)]
    wide = [a for a in leaves if is_wide(a)]
    done = (
        collectives.build_reduce(mesh, op.value)(collectives.put_row(mesh, device, narrow)) if narrow else []
    )
    of_narrow = iter([a.addressable_data(0) for a in done])
    of_wide = iter([_reduce_here(a, op) for a in zip(*_rows(group, wide), strict=True)] if wide else [])
    return jax.tree.unflatten(tree, [next(of_wide if is_wide(a) else of_narrow) for a in leaves])


def _reduce_here(rows: tuple[Any, ...], op: ReduceOp) -> Any:
    """`op` over arrays that are all here."""
    if is_wide(rows[0]):
        return collectives.reduce_stack(np.stack(rows), op.value, np)
    return collectives.reduce_stack(jax.numpy.stack(rows), op.value)


def _swapped(xs: list[PyTree], call: str) -> list[PyTree]:
    group = process_group.current()
    items, problem = _items(xs, group)
    agree(group, call, items, problem=problem)
    mesh, device = _mesh(group)
    made = collectives.build_all_to_all(mesh)(collectives.put_row(mesh, device, pack(items)))
    return unpack(jax.tree.map(lambda a: a.addressable_data(0)[0], made), items)


# ---- what is checked before ---------------------------------------------------------------------------


def _checked(x: PyTree) -> tuple[PyTree, str]:
    """(arrays, "") or (None, what is wrong): the other ranks receive it and do not wait."""
    try:
        return as_arrays(x), ""
    except DataError as error:
        return None, str(error)


def _items(xs: Any, group: ProcessGroup) -> tuple[list[PyTree], str]:
    """One tree a rank, all alike, or what is wrong."""
    world_size = group.topology.world_size
    if not isinstance(xs, list | tuple) or len(xs) != world_size:
        given = f"a list of {len(xs)}" if isinstance(xs, list | tuple) else type(xs).__name__
        return [], f"expected a list with one item for each of {world_size} ranks, got {given}."
    items, problem = _checked(list(xs))
    kinds = {str(describe(item)) for item in items or []}
    return (items, "") if len(kinds) == 1 else ([], problem or "items differ in shape or dtype.")


def _op(op: Any) -> ReduceOp:
    try:
        return ReduceOp(op)
    except ValueError:
        raise ConfigError(
            f"op={op!r} is not a reduction. HINT: use one of ReduceOp.{', '.join(o.name for o in ReduceOp)}."
        ) from None


def _rank(rank: int, name: str) -> int:
    world_size = process_group.get_world_size()
    if not 0 <= rank < world_size:
        raise ConfigError(f"{name}={rank} is not a rank. HINT: ranks here are 0 to {world_size - 1}.")
    return rank


def _to_json(value: Any) -> tuple[np.ndarray, str]:
    try:
        return np.frombuffer(json.dumps(value).encode(), np.uint8), ""
    except (TypeError, ValueError) as error:
        return np.zeros(0, np.uint8), f"the value is not JSON: {error}"


def _from_json(data: Any) -> Any:
    return json.loads(np.asarray(data).tobytes())
