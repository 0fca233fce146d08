"""How a device computes its parts: with a call for each, or with one call that loops over them.

In both cases the program text is the same in every layout, so the bits do not depend on how many parts a
device has: the loop gets the first and the last part as arguments, and part n is in row n of its arrays on
every device. The bits of a part may differ between the two ways, so the choice must not depend on the layout
either: it depends on the program of a part and the number of parts.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from cyxjax.core.exchange import equations
from cyxjax.core.scopes import holding
from cyxjax.core.trees import PyTree

_LOOP_BYTES = 64 << 20
"""Limit on the memory of a loop, for all parts together. An MLP of 2.9 M parameters gained nothing at 93 MB;
one of 0.2 M took half the time, because its calls cost as much as its products (`scripts/bench/exact.py`)."""

OPTIONS = {"xla_gpu_deterministic_ops": True}
"""Compiler options: no sums with atomic additions, and no kernels chosen by timing."""

_ASKING = (*OPTIONS, "xla_gpu_exclude_nondeterministic_ops")
_here: ContextVar[bool] = ContextVar("repeatable", default=False)
_everywhere = False


def repeatable() -> AbstractContextManager[None]:
    """Declares that code traced inside will be compiled with `OPTIONS`."""
    return holding(_here, True)


def read_xla_flags(flags: str) -> None:
    """Records for this process whether `flags` (XLA_FLAGS) ask for repeatable programs."""
    global _everywhere
    values = dict(flag.lstrip("-").partition("=")[::2] for flag in flags.split())
    _everywhere = any(values.get(name, "false").lower() not in ("false", "0") for name in _ASKING)


def must_repeat() -> bool:
    """Whether code traced now must be deterministic; then only deterministic kernels may be chosen.

    cuDNN's attention is not: if it is chosen anyway, XLA of jax 0.11.2 ends with an internal IndexError.
    """
    return _everywhere or _here.get()


class Part(NamedTuple):
    """The rows of one part, in numpy: `jit` moves them to the device that it runs on."""

    number: Any  # int32 ()
    inputs: PyTree  # leaves (B, ...)
    targets: PyTree
    weight: Any  # float32 (B,): 1 for a sample, 0 for padding


Parts = Part
"""k consecutive parts: leaves have an additional first dimension, number (k,) and so on."""


class Stacked(NamedTuple):
    """The results of a loop: leaves (V, ...), with part n in row n for the parts of this device."""

    rows: PyTree


Made: TypeAlias = list[PyTree] | Stacked
"""The results of a device's parts: a tree for each, from a call for each, or `Stacked`; a pytree."""


def tree_of_each_part(made: Made, numbers: range) -> Sequence[PyTree]:
    """A tree for each part. numbers: of the device's parts."""
    return [row(made.rows, n) for n in numbers] if isinstance(made, Stacked) else made


class SeparateCalls:
    """A call for each part: (states, parts, total) -> results; all but `total` by device."""

    name = "each alone"

    def __init__(self, program: Any):
        self._program = program

    def __call__(self, states: Sequence[Any], parts: Sequence[Parts], total: Any) -> list[Any]:
        made: list[list[PyTree]] = [[] for _ in parts]
        counts = [len(mine.number) for mine in parts]
        for slot in range(max(counts)):  # all devices get their first part before any gets its second
            for trees, state, mine, count in zip(made, states, parts, counts, strict=True):
                if slot < count:
                    trees.append(self._program(state, row(mine, slot), total))
        return made

    def lower(self, state: Any, parts: Parts, total: Any) -> jax.stages.Lowered:
        return self._program.lower(state, row(parts, 0), total)


class LoopedCalls:
    """One call of a loop over the parts of a device; it writes into the arrays of the step before.

    like: shapes of the result of one part.
    """

    name = "in a loop"

    def __init__(self, function: Callable, threads: int | None, num_parts: int, like: PyTree):
        self._num_parts = num_parts
        self._empty = lambda: jax.tree.map(lambda s: np.zeros((num_parts, *s.shape), s.dtype), like)
        self._into: dict[jax.Device, PyTree] = {}

        def loop(state: Any, parts: Parts, bounds: Any, total: Any, into: PyTree) -> PyTree:
            def one(number: Any, into: PyTree) -> PyTree:
                rows = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False), parts)
                put = lambda a, new: lax.dynamic_update_index_in_dim(a, new, number, 0)  # noqa: E731
                return jax.tree.map(put, into, function(state, rows, total))

            return lax.fori_loop(bounds[0], bounds[1], one, into)

        loop.__name__ = f"loop_of_{function.__name__}"
        self._program = jax.jit(named(loop, threads), donate_argnums=4, compiler_options=OPTIONS)

    def __call__(self, states: Sequence[Any], parts: Sequence[Parts], total: Any) -> list[Any]:
        return [self._one(*both, total) for both in zip(states, parts, strict=True)]

    def lower(self, state: Any, parts: Parts, total: Any) -> jax.stages.Lowered:
        into = jax.device_put(self._empty(), _device_of(state))
        return self._program.lower(state, *self._placed(parts), total, into)

    def _one(self, state: Any, parts: Parts, total: Any) -> Stacked:
        device = _device_of(state)
        # Popped, because the call donates these arrays: if it fails, they cannot be written to again.
        into = self._into.pop(device, None)
        into = jax.device_put(self._empty(), device) if into is None else into
        made = self._program(state, *self._placed(parts), total, into)
        self._into[device] = made
        return Stacked(made)

    def _placed(self, parts: Parts) -> tuple[Parts, np.ndarray]:
        """(all rows with part n in row n, bounds of the rows that this device has)."""
        bounds = np.array([parts.number[0], parts.number[-1] + 1], np.int32)
        if len(parts.number) == self._num_parts:
            return parts, bounds

        def spread(leaf: np.ndarray) -> np.ndarray:
            whole = np.zeros((self._num_parts, *leaf.shape[1:]), leaf.dtype)
            whole[slice(*bounds)] = leaf
            return whole

        return jax.tree.map(spread, parts), bounds


def row(tree: PyTree, number: int) -> PyTree:
    """One row of each leaf of `tree`, such as a part of `Parts`: views."""
    return jax.tree.map(lambda leaf: leaf[number], tree)


class PartProgram:
    """`function` (state, Part, total) -> tree, over the parts of each device; the first call chooses how."""

    def __init__(self, function: Callable, threads: int | None, num_parts: int):
        self._function, self._threads, self._num_parts = function, threads, num_parts
        self.alone = jax.jit(named(function, threads), compiler_options=OPTIONS)
        self._calls: SeparateCalls | LoopedCalls | None = None
        self._compiled = False

    def calls(self, state: Any, parts: Parts, total: Any) -> SeparateCalls | LoopedCalls:
        """How the parts are computed; only the shapes of the arguments are used."""
        if self._calls is None:
            traced = self.alone.trace(state, row(parts, 0), total)
            like = traced.out_info
            if suits_a_loop(traced.jaxpr.jaxpr, (like, row(parts, 0)), self._num_parts):
                self._calls = LoopedCalls(self._function, self._threads, self._num_parts, like)
            else:
                self._calls = SeparateCalls(self.alone)
        return self._calls

    def __call__(self, states: Sequence[Any], parts: Sequence[Parts], total: Any) -> list[Any]:
        """The results (`Made`) by device."""
        calls = self.calls(states[0], parts[0], total)
        if not self._compiled:
            compile_together(calls.lower(*both, total) for both in zip(states, parts, strict=True))
            self._compiled = True
        return calls(states, parts, total)


def suits_a_loop(jaxpr: Jaxpr, held: PyTree, num_parts: int) -> bool:
    """Whether a loop is no slower than calls. held: arrays or shapes that a loop holds for each part."""
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
    has_slow = any(map(is_slow_in_loops, equations(jaxpr)))
    return not jaxpr.effects and not has_slow and num_parts * num_bytes <= _LOOP_BYTES


def is_slow_in_loops(eqn: JaxprEqn) -> bool:
    """Whether it is a grouped convolution: 10 to 30 times as slow in a loop on a CPU (jaxlib 0.10.2)."""
    groups = eqn.params.get("feature_group_count", 1), eqn.params.get("batch_group_count", 1)
    return groups != (1, 1)


def _device_of(state: Any) -> jax.Device:
    return next(iter(jax.tree.leaves(state)[0].devices()))


def compile_together(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compiles the same text for all devices at the same time, one core each; jit then finds it compiled.

    Loading one executable on the other devices would be faster, but then their collectives deadlocked on 8
    devices (jaxlib 0.10.2, `deserialize_executable`).
    """
    lowered = list(programs)
    with ThreadPoolExecutor(len(lowered)) as pool:
        list(pool.map(lambda one: one.compile(), lowered))


def named(function: Callable, threads: int | None) -> Callable:
    """`function`, to be compiled with `OPTIONS`, under a name that contains the number of threads.

    Compilers split sums by threads, and a cache of programs on disk identifies a program only by its text.
    """

    def renamed(*args: Any) -> Any:
        with repeatable():
            return function(*args)

    renamed.__name__ = f"{function.__name__}_of_{threads}_threads"
    return renamed
