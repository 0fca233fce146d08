"""Where the samples of a batch lie in what a norm takes: told from the program, before anything is computed.

A model may bring its batch anywhere: (T, B, F), (B * T, F), two views one below the other. So its program is
traced for two batch sizes: the dimension that grows with the batch is its own, whatever other dimensions are
as large; and from the inputs to each norm one follows in which order a dimension that is joined of several
holds the samples.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

PyTree = Any
_TAG = "cyxjax batch norm "
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call")
_WITH_RULES = ("custom_vjp_call", "custom_vjp_call_jaxpr")
_MOVES_ROWS = ("gather", "sort", "rev", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice")


class Rows(NamedTuple):
    """Dimension `dim` holds `outer` times all samples, each `inner` times in a row."""

    dim: int
    outer: int
    inner: int


class _Order(NamedTuple):
    outer: int
    inner: int


_UNKNOWN = "unknown"  # samples in an order one cannot tell
_MIXED = "mixed"  # several dimensions grow: pairs of samples
_Found = _Order | str | None  # None: no samples in it, or made of none
Layouts = dict[tuple[int, ...], Rows | str | None]
"""By the shape of what a norm takes: where its samples are; None: nowhere; a word: one cannot tell."""


def tagged(x: jax.Array, how: str = "") -> jax.Array:
    """`x`, marked in the program as what a norm takes; how: a word where no weights can be given to it."""
    return checkpoint_name(x, _TAG + how + ":" + ",".join(map(str, x.shape)))


def layouts_of(apply: Callable, args: tuple, inputs: PyTree, key: Any, rows: int) -> Layouts | None:
    """Of all norms that `apply(*args, inputs, key)` has; None where the program cannot be traced for others.

    inputs: `rows` samples in the first dimension. What norms take is marked by `tagged`.
    """
    # Multiples, for models that cut a batch in groups; sizes that hardly another dimension has, for jax would
    # leave out a reshape to the same shape, in one of the two. Nothing is computed.
    few = 7 * rows
    shape = lambda a, *first: jax.ShapeDtypeStruct((*first, *a.shape[len(first) :]), a.dtype)  # noqa: E731
    if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in jax.tree.leaves(inputs)):
        return None
    fixed = jax.tree.map(shape, (args, key))
    try:
        one, two = (
            jax.make_jaxpr(lambda args, x, key: apply(*args, x, key))(
                fixed[0], jax.tree.map(lambda a, n=n: shape(a, n), inputs), fixed[1]
            )
            for n in (few, 2 * few)
        )
        walk = _Walk(few, rows, {})
        begin = [walk.first(a, b) for a, b in _pairs(one.jaxpr.invars, two.jaxpr.invars)]
        walk.through(one.jaxpr, two.jaxpr, begin)
    except Exception:  # a model of one batch size, whose own words would mislead here: it runs as it is
        return None
    return walk.found


class _Walk(NamedTuple):
    few: int  # the smaller batch size
    rows: int  # the batch size asked for
    found: Layouts

    def times(self, a: Any, b: Any) -> int | None:
        """How often all samples lie in the dimension that grows; 0 where none does; None: one cannot tell."""
        dims = _growing(a, b)
        if not dims:
            return 0
        m, n = a.aval.shape[dims[0]], b.aval.shape[dims[0]]
        return m // self.few if len(dims) == 1 and n == 2 * m and m % self.few == 0 else None

    def first(self, a: Any, b: Any) -> _Found:
        return _Order(1, 1) if _growing(a, b) else None

    def through(self, one: Jaxpr, two: Jaxpr, known: list[_Found]) -> list[_Found]:
        """Of the outputs of a program traced for both sizes. Raises: ValueError where the two differ."""
        env: dict[Any, _Found] = dict(zip(one.invars, known, strict=True))
        read = lambda v: None if isinstance(v, Literal) else env.get(v)  # noqa: E731
        for e, f in _pairs(one.eqns, two.eqns):
            if e.primitive is not f.primitive:
                raise ValueError("two programs")
            env.update(zip(e.outvars, self.after(e, f, [read(v) for v in e.invars]), strict=True))
        return [read(v) for v in one.outvars]

    def after(self, e: Any, f: Any, given: list[_Found]) -> list[_Found]:
        name, inner = e.primitive.name, [_open(one) for one in _programs(e)]
        if _is_tag(e):
            self.note(e, f, given[0])
        if name == "scan":
            return self.scanned(e, f, given, inner[0], _open(next(_programs(f))))
        if name in (*_CALLS, *_WITH_RULES) and len(inner[0].invars) == len(given):
            return self.through(inner[0], _open(next(_programs(f))), given)
        if any(map(_holds_a_norm, inner)):
            raise ValueError("a norm in a branch")
        return [self.out(e, f, given, a, b) for a, b in _pairs(e.outvars, f.outvars)]

    def out(self, e: Any, f: Any, given: list[_Found], a: Any, b: Any) -> _Found:
        """Of one output of an operation: the order that its operands of that size have."""
        times, name = self.times(a, b), e.primitive.name
        of_samples = [one for one in given if one is not None]
        if times == 0 or not of_samples:
            return None
        if _UNKNOWN in of_samples:
            return _UNKNOWN
        if times is None:
            return _MIXED if len(_growing(a, b)) > 1 else _UNKNOWN
        if name == "reshape":
            return self.reshaped(*next(_pairs(e.invars, f.invars)), given[0], a, b)
        if name == "concatenate" and e.params["dimension"] == _growing(a, b)[0]:
            first = given[0]
            alike = isinstance(first, _Order) and len(set(given)) == 1
            return _Order(first.outer * len(given), first.inner) if alike else _UNKNOWN  # type: ignore[union-attr]
        if times == 1:
            return _Order(1, 1)
        fitting = {one for one in of_samples if isinstance(one, _Order) and one.outer * one.inner == times}
        moved = name in _MOVES_ROWS and given[0] is not None
        return fitting.pop() if len(fitting) == 1 and not moved else _UNKNOWN

    def reshaped(self, x: Any, y: Any, order: _Found, a: Any, b: Any) -> _Found:
        """A sample's numbers keep their places among all: `inner` of them together, `outer` times over."""
        if not isinstance(order, _Order):
            return _UNKNOWN
        (d,), (dim,) = _growing(x, y), _growing(a, b)
        before, after = x.aval.shape, a.aval.shape
        inner, rest = divmod(order.inner * math.prod(before[d + 1 :]), math.prod(after[dim + 1 :]))
        outer, more = divmod(order.outer * math.prod(before[:d]), math.prod(after[:dim]))
        whole = not rest and not more and outer * self.few * inner == after[dim]
        return _Order(outer, inner) if whole else _UNKNOWN

    def scanned(self, e: Any, f: Any, given: list[_Found], one: Jaxpr, two: Jaxpr) -> list[_Found]:
        first, carries = e.params["num_consts"], e.params["num_carry"]
        vars_ = _pairs(one.invars, two.invars)
        known = [order if _growing(a, b) else None for order, (a, b) in zip(given, vars_, strict=True)]
        after = self.through(one, two, known)
        for n in range(carries):  # a first carry of zeros is made of no samples
            known[first + n] = known[first + n] or after[n]
        after = self.through(one, two, known)
        outs = [self.out(e, f, given, a, b) for a, b in _pairs(e.outvars, f.outvars)]
        return [order or out for order, out in zip(after, outs, strict=True)]

    def note(self, e: Any, f: Any, order: _Found) -> None:
        """Notes where the samples are in what a norm takes; a map around it hides dimensions."""
        (how, a), (_, b) = _tag(e), _tag(f)
        dims = [d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]
        shape = tuple(n * self.rows // self.few if d in dims else n for d, n in enumerate(a))
        found: Rows | str | None = _UNKNOWN if dims else None  # None: each sample has statistics of its own
        if len(dims) == 1 and isinstance(order, _Order):
            found = Rows(dims[0], *order)
        found = how if how and order is not None else found
        self.found[shape] = found if self.found.setdefault(shape, found) == found else _UNKNOWN


def _growing(a: Any, b: Any) -> list[int]:
    """Dimensions in which `b`, of the larger batch, is larger than `a`."""
    return [i for i, (m, n) in enumerate(zip(a.aval.shape, b.aval.shape, strict=True)) if m != n]


def _is_tag(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(_TAG)


def _tag(eqn: Any) -> tuple[str, tuple[int, ...]]:
    how, _, shape = eqn.params["name"][len(_TAG) :].partition(":")
    return how, tuple(int(n) for n in shape.split(",") if n)


def _holds_a_norm(program: Jaxpr) -> bool:
    return any(_is_tag(e) or any(_holds_a_norm(_open(one)) for one in _programs(e)) for e in program.eqns)


def _programs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, Jaxpr | ClosedJaxpr):
                yield one


def _open(program: Any) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def _pairs(one: Any, two: Any) -> Iterator[tuple[Any, Any]]:
    """Raises: ValueError where one is longer."""
    return zip(one, two, strict=True)


def row_weights(x: jax.Array, weight: jax.Array, layouts: Layouts | None) -> jax.Array:
    """What each sample weighs (`weight`, shape (B,)) where it lies in `x`; in a shape that broadcasts to x's.

    NaN where one cannot tell and some weigh nothing: whoever knew of padding asked `untold` before.
    """
    found = _plain(x.shape, len(weight)) if layouts is None else layouts.get(x.shape, _UNKNOWN)
    if found is None:
        return jnp.ones([1] * x.ndim)
    if isinstance(found, str):
        return whole(weight).reshape([1] * x.ndim)
    rows = jnp.tile(jnp.repeat(weight, found.inner), found.outer)
    return rows.reshape([-1 if d == found.dim else 1 for d in range(x.ndim)])


def untold(layouts: Layouts | None, rows: int) -> str:
    """What to say of a norm that takes `rows` samples in an order one cannot tell; "" where there is none."""
    odd = next((shape for shape, found in (layouts or {}).items() if isinstance(found, str)), None)
    what = f"a BatchNorm of the model takes {odd} of {rows} samples, and which is whose cannot be told"
    return "" if odd is None else what


def whole(weight: jax.Array) -> jax.Array:
    """1 where all samples weigh something, else NaN."""
    return jnp.where((weight > 0).all(), 1.0, jnp.nan)


def _plain(shape: tuple[int, ...], rows: int) -> Rows | str:
    """Of a program that was not followed: the first dimension, where no other can be the batch."""
    others = [n for n in shape[1:] if n % rows == 0]
    return Rows(0, 1, 1) if shape and shape[0] == rows and (rows == 1 or not others) else _UNKNOWN
