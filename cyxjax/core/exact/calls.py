"""How a device computes the parts it holds: a call for each, or one call that loops over them.

Either way the text of what runs is the same in every layout, so it does not matter to the bits who holds how
many parts: the loop is given the first and the last, and part n lies in row n of its arrays wherever it is
computed. The bits of a part may differ between the two, so which of them it is must not depend on the layout
either. It is read off the program of a part and the number of parts.
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
"""What a loop may hold, for all parts at once. An MLP of 2.9 M parameters gained nothing by it at 93 MB; one
of 0.2 M took half the time, for its calls cost as much as its products (`scripts/bench/exact.py`)."""

OPTIONS = {"xla_gpu_deterministic_ops": True}
"""For the compiler: no sums by atomic additions, and no kernels chosen by timing them."""

_ASKING = (*OPTIONS, "xla_gpu_exclude_nondeterministic_ops")
_here: ContextVar[bool] = ContextVar("repeatable", default=False)
_everywhere = False


def repeatable() -> AbstractContextManager[None]:
    """What is traced inside will be compiled with `OPTIONS`."""
    return holding(_here, True)


def heed(flags: str) -> None:
    """Whether `flags` (XLA_FLAGS) ask for repeatable programs, for all that this process traces."""
    global _everywhere
    values = dict(flag.lstrip("-").partition("=")[::2] for flag in flags.split())
    _everywhere = any(values.get(name, "false").lower() not in ("false", "0") for name in _ASKING)


def must_repeat() -> bool:
    """Whether what is traced now must be deterministic; then no kernel without that property may be chosen.

    cuDNN's attention cannot, and XLA of jax 0.11.2 then ends with an IndexError of its own.
    """
    return _everywhere or _here.get()


class Part(NamedTuple):
    """The rows of one part, in numpy: `jit` puts them on the device it runs on."""

    number: Any  # int32 ()
    inputs: PyTree  # leaves (B, ...)
    targets: PyTree
    weight: Any  # float32 (B,): 1 for a sample, 0 for padding


Parts = Part
"""Neighbouring parts, k of them: leaves have one more dimension in front, number (k,) and so on."""


class Stacked(NamedTuple):
    """From a loop: leaves (V, ...), in row n what part n came to, where this device has it."""

    rows: PyTree


Made: TypeAlias = list[PyTree] | Stacked
"""What the parts of a device came to: a tree for each, from a call for each, or `Stacked`; a pytree."""


def tree_of_each(made: Made, numbers: range) -> Sequence[PyTree]:
    """A tree for each part. numbers: those of the device."""
    return [row(made.rows, n) for n in numbers] if isinstance(made, Stacked) else made


class EachAlone:
    """A call for each part: (states, parts, total) -> what they came to; all but `total` by device."""

    name = "each alone"

    def __init__(self, program: Any):
        self._program = program

    def __call__(self, states: Sequence[Any], parts: Sequence[Parts], total: Any) -> list[Any]:
        made: list[list[PyTree]] = [[] for _ in parts]
        counts = [len(mine.number) for mine in parts]
        for slot in range(max(counts)):  # every device gets its first part before any its second
            for trees, state, mine, count in zip(made, states, parts, counts, strict=True):
                if slot < count:
                    trees.append(self._program(state, row(mine, slot), total))
        return made

    def lower(self, state: Any, parts: Parts, total: Any) -> jax.stages.Lowered:
        return self._program.lower(state, row(parts, 0), total)


class InALoop:
    """One call of a loop over the parts of a device; it writes into the arrays of the step before.

    like: what one part comes to, as shapes.
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
        # Given away by the call: where it fails there is nothing to write into a second time.
        into = self._into.pop(device, None)
        into = jax.device_put(self._empty(), device) if into is None else into
        made = self._program(state, *self._placed(parts), total, into)
        self._into[device] = made
        return Stacked(made)

    def _placed(self, parts: Parts) -> tuple[Parts, np.ndarray]:
        """(all rows, part n in row n, bounds of those that are there)."""
        bounds = np.array([parts.number[0], parts.number[-1] + 1], np.int32)
        if len(parts.number) == self._num_parts:
            return parts, bounds

        def spread(leaf: np.ndarray) -> np.ndarray:
            whole = np.zeros((self._num_parts, *leaf.shape[1:]), leaf.dtype)
            whole[slice(*bounds)] = leaf
            return whole

        return jax.tree.map(spread, parts), bounds


def row(tree: PyTree, number: int) -> PyTree:
    """One of the rows of `tree`, such as a part of `Parts`: views."""
    return jax.tree.map(lambda leaf: leaf[number], tree)


class PartProgram:
    """`function` (state, Part, total) -> tree, over the parts of each device; how, is found at the first."""

    def __init__(self, function: Callable, threads: int | None, num_parts: int):
        self._function, self._threads, self._num_parts = function, threads, num_parts
        self.alone = jax.jit(named(function, threads), compiler_options=OPTIONS)
        self._calls: EachAlone | InALoop | None = None
        self._compiled = False

    def way(self, state: Any, parts: Parts, total: Any) -> EachAlone | InALoop:
        """How they are computed; shapes alone are looked at."""
        if self._calls is None:
            traced = self.alone.trace(state, row(parts, 0), total)
            like = traced.out_info
            if suits_a_loop(traced.jaxpr.jaxpr, (like, row(parts, 0)), self._num_parts):
                self._calls = InALoop(self._function, self._threads, self._num_parts, like)
            else:
                self._calls = EachAlone(self.alone)
        return self._calls

    def __call__(self, states: Sequence[Any], parts: Sequence[Parts], total: Any) -> list[Any]:
        """What they came to (`Made`), by device."""
        way = self.way(states[0], parts[0], total)
        if not self._compiled:
            compile_together(way.lower(*both, total) for both in zip(states, parts, strict=True))
            self._compiled = True
        return way(states, parts, total)


def suits_a_loop(jaxpr: Jaxpr, held: PyTree, num_parts: int) -> bool:
    """Whether a loop is no slower than calls. held: what a loop holds of each part, arrays or shapes."""
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
    has_slow = any(map(is_slow_in_loops, equations(jaxpr)))
    return not jaxpr.effects and not has_slow and num_parts * num_bytes <= _LOOP_BYTES


def is_slow_in_loops(eqn: JaxprEqn) -> bool:
    """A convolution in groups takes 10 to 30 times as long in a loop, on a CPU (jaxlib 0.10.2)."""
    groups = eqn.params.get("feature_group_count", 1), eqn.params.get("batch_group_count", 1)
    return groups != (1, 1)


def _device_of(state: Any) -> jax.Device:
    return next(iter(jax.tree.leaves(state)[0].devices()))


def compile_together(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compiles the same text for each device at the same time, one core each; jit finds what it needs ready.

    One executable loaded on the others would be quicker still, but their collectives waited for each other
    for ever on 8 devices (jaxlib 0.10.2, `deserialize_executable`).
    """
    lowered = list(programs)
    with ThreadPoolExecutor(len(lowered)) as pool:
        list(pool.map(lambda one: one.compile(), lowered))


def named(function: Callable, threads: int | None) -> Callable:
    """`function`, to be compiled with `OPTIONS`, under a name that says the threads of its pool.

    Compilers cut sums by them, and a cache of programs on disk knows a program by its text alone.
    """

    def renamed(*args: Any) -> Any:
        with repeatable():
            return function(*args)

    renamed.__name__ = f"{function.__name__}_of_{threads}_threads"
    return renamed
