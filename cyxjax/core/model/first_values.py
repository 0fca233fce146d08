"""Initial values of a model, drawn leaf by leaf: leaves with the same operations share one small program.

A single program for all leaves costs XLA compile time for each leaf: 25 s for every 300 kernels. A model of
2,000 leaves has about ten shapes and initializers; leaves that share them differ only in their keys, which
are computed before: a program that derives keys as well takes up to twice the time to compile. Programs are
kept while the process lives: a second model with such leaves compiles nothing.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from cyxjax.core.exchange import bind, trace
from cyxjax.core.trees import PyTree

_SMALL = 1024  # numbers: an operation with at most this many may be repeated for each leaf
_MOST_TIMES = 4  # limit on repeated operations, relative to their number; beyond it leaves share too much
_KEPT = 64  # programs
# For code that runs once. The program of an MLP (CPU, jax 0.10.2) compiled in 0.35 s instead of 0.9 s, ran as
# fast and gave the same bits; at level 0 it was five times slower.
# Not with JAX_DISABLE_MOST_OPTIMIZATIONS, which sets level 0 for all programs.
_OPTIONS: dict[str, Any] = (
    {} if jax.config.read("jax_disable_most_optimizations") else {"xla_backend_optimization_level": 1}
)


class Kind(NamedTuple):
    """Leaves drawn by the same operations: `run` computes what `form` describes."""

    form: Hashable
    run: Callable[..., list[Any]]
    members: list[tuple[list[int], list[Any]]]  # indices of the outputs, and arguments of `run`


def draw(values: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """`values(*args)`, with the same bits as one program for all leaves.

    Each leaf is computed by the operations that it needs, in their order. Operations that several leaves need
    are computed with these leaves in one program, unless they are small (keys). Not for use within a trace.
    """
    traced, flat, structure = trace(values, *args)
    kinds = find_kinds(traced, flat)
    if kinds is None:
        return jax.jit(values, compiler_options=_OPTIONS)(*args)
    out: dict[int, Any] = {}
    # Kinds with equally many members share a program, run that often: programs have a cost.
    for count in {len(kind.members) for kind in kinds}:
        some = [kind for kind in kinds if len(kind.members) == count]
        work = _Work(tuple(kind.form for kind in some), [kind.run for kind in some])
        # A program with constant arrays is not kept: they may be large.
        program = (_program.__wrapped__ if traced.consts else _program)(work)
        for members in zip(*(kind.members for kind in some), strict=True):
            drawn = program([given for _, given in members])
            for (places, _), found in zip(members, drawn, strict=True):
                out |= zip(places, found, strict=True)
    return jax.tree.unflatten(structure, [out[place] for place in range(len(out))])


@dataclass(frozen=True)
class _Work:
    """Functions to run one after another; equal to any other with the same forms."""

    forms: tuple[Hashable, ...]
    runs: list[Callable] = field(compare=False)

    def __call__(self, given: list[list[Any]]) -> list[list[Any]]:
        return [run(*one) for run, one in zip(self.runs, given, strict=True)]


@lru_cache(maxsize=_KEPT)
def _program(work: _Work) -> Callable:
    return jax.jit(lambda given: work(given), compiler_options=_OPTIONS)


def find_kinds(traced: Any, args: list[Any]) -> list[Kind] | None:
    """The leaves that a traced function computes from `args`, grouped by their operations.

    None if leaves cannot be drawn separately: the function has effects, or leaves share too many operations.
    """
    groups = _groups(traced.jaxpr)
    num_equations = sum(len(equations) for _, equations in groups)
    if traced.effects or num_equations > _MOST_TIMES * len(traced.jaxpr.eqns):
        return None
    known = dict(zip(traced.jaxpr.invars, args, strict=True))
    constants = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    kinds: dict[Hashable, Kind] = {}
    for places, equations in groups:
        ends = [traced.jaxpr.outvars[i] for i in places]
        form, given, run = _computation(ends, equations, known, constants)
        kinds.setdefault(form, Kind(form, run, [])).members.append((places, given))
    return list(kinds.values())


def _groups(jaxpr: Any) -> list[tuple[list[int], list[Any]]]:
    """(indices of outputs, equations that they need, in order): outputs that share work are together."""
    maker = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    owner: dict[int, int] = {}  # large equation -> the first output that needs it
    parent = list(range(len(jaxpr.outvars)))
    needs: list[set[int]] = []

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for place, var in enumerate(jaxpr.outvars):
        found: set[int] = set()
        waiting = [var]
        while waiting:
            one = waiting.pop()
            n = None if isinstance(one, core.Literal) else maker.get(one)
            if n is None or n in found:
                continue
            found.add(n)
            waiting += jaxpr.eqns[n].invars
            if any(prod(v.aval.shape) > _SMALL for v in jaxpr.eqns[n].outvars):
                parent[root(place)] = root(owner.setdefault(n, place))
        needs.append(found)
    together: dict[int, list[int]] = {}
    for place in range(len(needs)):
        together.setdefault(root(place), []).append(place)
    return [
        (places, [jaxpr.eqns[n] for n in sorted(set().union(*(needs[p] for p in places)))])
        for places in together.values()
    ]


def _computation(
    outvars: list[Any], equations: list[Any], known: dict[Any, Any], constants: Mapping[Any, Any]
) -> tuple[Hashable, list[Any], Callable]:
    """(form, arguments, function of the arguments): equal forms describe the same computation.

    Keys that follow from what is known are computed here, added to `known`, and become arguments. Constants
    are part of the form, since the compiler may compute with them in advance.
    """
    given: list[Any] = []
    names: dict[Any, Hashable] = {}
    form: list[Hashable] = []
    steps: list[tuple[Any, tuple]] = []

    def name(v: Any) -> Hashable:
        if isinstance(v, core.Literal):
            return _Fixed(v.val, (np.asarray(v.val).tobytes(), str(v.aval)))
        if v not in names and v in constants:
            names[v] = _Fixed(constants[v], (id(constants[v]),))
        elif v not in names:
            given.append(known[v])
            names[v] = "given", len(given) - 1, str(v.aval)
        return names[v]

    for eqn in equations:
        makes_keys = all(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in eqn.outvars)
        if makes_keys and all(isinstance(v, core.Literal) or v in known for v in eqn.invars):
            if eqn.outvars[0] not in known:
                values = [v.val if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
                known |= zip(eqn.outvars, bind(eqn, values), strict=True)
            continue
        read = tuple(map(name, eqn.invars))
        form.append((eqn.primitive, read, tuple(_hashable(p) for p in sorted(eqn.params.items()))))
        names |= {v: ("made", len(steps), i) for i, v in enumerate(eqn.outvars)}
        steps.append((eqn, read))
    ends = tuple(map(name, outvars))

    def run(*given: Any) -> list[Any]:
        found: dict[Hashable, Any] = {}
        value = lambda a: a.value if isinstance(a, _Fixed) else given[a[1]] if a[0] == "given" else found[a]  # noqa: E731
        for n, (eqn, read) in enumerate(steps):
            found |= {("made", n, i): v for i, v in enumerate(bind(eqn, map(value, read)))}
        return [jnp.asarray(value(a)) for a in ends]

    return (*form, ends), given, run


@dataclass(frozen=True)
class _Fixed:
    """A constant of a program; equal to another with the same form."""

    value: Any = field(compare=False)
    form: Hashable


def _hashable(value: Any) -> Hashable:
    """`value`; without a hash, an object that is equal only to itself and keeps `value` and its id alive."""
    try:
        hash(value)
    except TypeError:
        return _Fixed(value, id(value))
    return value
