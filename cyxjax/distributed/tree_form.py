"""The form of a tree as JSON, so that a rank that has no value can make zeros of the same form."""

from typing import Any

import jax.numpy as jnp
import numpy as np

PyTree = Any


def describe(tree: PyTree, problem: str = "") -> tuple[Any, str]:
    """(form, "") of a tree of dicts, lists and tuples, or (None, what is wrong)."""
    if problem:
        return None, problem
    try:
        return _form(tree), ""
    except TypeError as error:
        return None, str(error)


def zeros(form: Any) -> PyTree:
    """A tree of host arrays of that form."""
    kind, inner = form
    if kind == "dict":
        return {name: zeros(one) for name, one in inner}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(zeros(one) for one in inner)
    dtype, shape = inner
    return np.zeros(shape, jnp.dtype(dtype))


def _form(tree: PyTree) -> Any:
    if isinstance(tree, dict) and all(isinstance(name, str) for name in tree):
        return ["dict", [[name, _form(tree[name])] for name in sorted(tree)]]
    if type(tree) in (list, tuple):
        return [type(tree).__name__, [_form(one) for one in tree]]
    if hasattr(tree, "dtype") and hasattr(tree, "shape"):
        return ["array", [str(tree.dtype), list(tree.shape)]]
    raise TypeError(f"{type(tree).__name__} cannot be scattered; expected dicts, lists, tuples and arrays.")
