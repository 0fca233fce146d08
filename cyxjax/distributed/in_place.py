"""Collectives as statements, as in torch: the result is written into the array passed, or an error is raised.

A jax array is a value, so `all_reduce(x)` on a line of its own would change nothing and raise no error. A
numpy array that may be written to is filled instead. Whether the result is used is read from the caller's
next instruction.
"""

import dis
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np

from cyxjax.core.trees import PyTree
from cyxjax.errors import DataError


def target_of(x: PyTree, call: str, frame: FrameType) -> PyTree | None:
    """What the result is to be written into: `x` where the caller throws it away; None where it is used.

    call: as it should be written, for the message. Raises: DataError for a value that cannot be filled.
    """
    return target_in_place(x, call) if thrown_away(frame.f_code, frame.f_lasti) else None


def target_in_place(x: PyTree, call: str) -> PyTree:
    """`x`, which is to be filled. Raises: DataError for a value that cannot be."""
    odd = next((leaf for leaf in jax.tree.leaves(x) if not _is_writable(leaf)), None)
    if odd is not None or not jax.tree.leaves(x):
        kind = "nothing" if odd is None else _kind(odd)
        raise DataError(
            f"the result of {call} is thrown away, and {kind} cannot be changed in place: arrays are values. "
            f"HINT: write {call}, or pass a numpy array that may be written to."
        )
    return x


def fill(target: PyTree | None, result: PyTree) -> PyTree:
    """`result`, written into `target` too, where there is one. Raises: DataError where it does not fit."""
    if target is None:
        return result
    into, values = jax.tree.leaves(target), jax.tree.leaves(result)
    for array, value in zip(into, map(np.asarray, values), strict=True):
        if array.shape != value.shape or not np.can_cast(value.dtype, array.dtype, "same_kind"):
            raise DataError(
                f"the result is {value.dtype}{list(value.shape)}, the array to fill {array.dtype}"
                f"{list(array.shape)}. HINT: use the value that is returned, or pass an array of that kind."
            )
        np.copyto(array, value, casting="same_kind")
    return result


def fill_list(out: list, rows: list[PyTree], call: str) -> None:
    """The rows of all ranks put into torch's list: into its numpy arrays, or as items in place of others.

    Raises: DataError for a list of another length.
    """
    if len(out) != len(rows):
        raise DataError(
            f"{call} got a list of {len(out)} for {len(rows)} ranks. HINT: [np.zeros_like(x) for _ in "
            "range(world_size)], or use the list that is returned."
        )
    for i, row in enumerate(rows):
        if jax.tree.leaves(out[i]) and all(map(_is_writable, jax.tree.leaves(out[i]))):
            fill(out[i], row)
        else:
            out[i] = row


def thrown_away(code: CodeType, at: int) -> bool:
    """Whether the value of the call at `at` (bytes into `code`) is dropped by the next instruction."""
    after = (one.opname for one in dis.get_instructions(code) if one.offset > at)
    return next((name for name in after if name not in ("CACHE", "NOP", "PRECALL")), "") == "POP_TOP"


def _is_writable(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.flags.writeable


def _kind(leaf: Any) -> str:
    return "a read-only numpy array" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
