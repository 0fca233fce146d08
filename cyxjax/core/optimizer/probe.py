"""What an optimizer asks of the parameters it is given: read from its traced update, nothing is computed.

A strategy that cuts leaves into parts needs a rule that moves each number by itself. An optax transformation
does not say whether it is one; the operations of its update do.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh

from cyxjax.core.mesh import PER_REPLICA
from cyxjax.core.replica import by_spec, from_replica, sync_map, to_replica
from cyxjax.core.step import TrainState, state_spec
from cyxjax.core.strategy import Sync
from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError, CyxjaxError

PyTree = Any
_SHAPING = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p", "pvary"})
_NAMES = """
    abs add add_any and atan2 cbrt ceil clamp conj convert_element_type cos cosh digamma div eq erf erf_inv
    exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = _SHAPING | frozenset(_NAMES.split())


def refuse_unless_elementwise(
    optimizer: optax.GradientTransformation, params: PyTree, cut: Callable, comm: str
) -> None:
    """Returns for a rule that moves each number by itself, whatever the leaf it is part of.

    params: shapes of the real tree. cut: (shape, parts) -> the shape of a part of a leaf of this shape.
    Raises: ConfigError naming the operation that looks at more than one number, or says that the rule
        treats a part otherwise than its leaf (a mask by shape).
    """
    whole = _traced(optimizer, params)
    odd = next((name for name in _operations(whole.jaxpr) if name not in _ELEMENTWISE), None)
    if odd is not None:
        raise _needs_whole_leaves(comm, f"looks at whole leaves or at the gradient's norm ({odd})")
    first = jax.make_jaxpr(optimizer.init)(params)
    odd = next((name for name in _operations(first.jaxpr) if name not in _ELEMENTWISE), None)
    if odd is not None:
        raise _needs_whole_leaves(comm, f"makes its first state from whole leaves ({odd})")
    if any(_differs_by_place(value) for value in (*_constants(whole), *_constants(first))):
        raise _needs_whole_leaves(comm, "holds an array of its own, with a number for each place of a leaf")
    # A scalar's part is an array of one number, for which more is traced: broadcasts, and their constants.
    vectors = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape or (1,), p.dtype), params)
    wanted = _signature(_traced(optimizer, vectors).jaxpr)
    by_shape = _without_constants(_signature(whole.jaxpr)) != _without_constants(wanted)
    # What is of one shape beside any leaf is no row of a leaf: a vector of one number would pass for a part.
    grown = jax.tree.map(lambda p: jax.ShapeDtypeStruct(_tripled(p.shape), p.dtype), params)
    if not _same_states(optimizer, params, grown, _tripled):
        raise _needs_whole_leaves(comm, "keeps a state that is not shaped like the parameters")
    for parts in (2, 2**30):
        of_parts = jax.tree.map(lambda p: jax.ShapeDtypeStruct(cut(p.shape, parts), p.dtype), params)  # noqa: B023
        if by_shape or _signature(_traced(optimizer, of_parts).jaxpr) != wanted:
            raise _needs_whole_leaves(comm, "chooses what it does by the shape of a leaf")
        if not _same_states(optimizer, params, of_parts, lambda shape: cut(shape, parts)):  # noqa: B023
            raise _needs_whole_leaves(comm, "keeps a state that is not shaped like the parameters")


def _tripled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(3 * n for n in shape)


def _needs_whole_leaves(comm: str, what: str) -> ConfigError:
    return ConfigError(
        f"comm={comm!r} shows the optimizer a part of each leaf, and this one {what}. "
        "HINT: clip with max_grad_norm of the configuration, or use comm='mean', which keeps leaves whole."
    )


def _traced(optimizer: optax.GradientTransformation, params: PyTree) -> ClosedJaxpr:
    with explained("of these parameters"):
        state = jax.eval_shape(optimizer.init, params)
        return jax.make_jaxpr(lambda g, s, p: optimizer.update(g, s, p))(params, state, params)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """A rule that cannot be run says so in one line of ours. Raises: ConfigError."""
    try:
        yield
    except CyxjaxError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as err:
        brief = " ".join(str(err).split())
        brief = brief if len(brief) < 200 else brief[:200] + "..."
        hint = next((said for sign, said in _ALTERNATIVES.items() if sign in brief), _ANY)
        raise ConfigError(
            f"the optimizer cannot make a step {where}: {type(err).__name__}: {brief} HINT: {hint}"
        ) from err


_ANY = (
    "a step gives it gradients, state and parameters, no loss and no second gradient; labels and masks must "
    "fit the parameters' tree; optax.adamw always fits."
)
_ALTERNATIVES = {  # part of optax's message -> what to take; a step's loss is known only after its exchange
    "linesearch": "a step has no loss to search along; optax.lbfgs(lr, linesearch=None) works as any rule.",
    "reduce_on_plateau": "one of several is told no loss; callbacks=[cx.ReduceLROnPlateau()] acts by epoch.",
    "traced array": "a schedule is given the step as an array: jnp.where for `if`, jnp.cos for math.cos.",
    "scale_by_polyak": "one of several is told no loss; optax.adam or another adaptive rule needs none.",
}


def check_update(sync: Sync, mesh: Mesh, state: TrainState, comm: str) -> None:
    """The strategy's update of `state` can be traced, and gives parameters and state of the same shapes.

    Nothing is computed or compiled. Raises: ConfigError in one line for a rule that cannot be run here.
    """
    spec = state_spec(sync)

    def update(state: TrainState, rows: PyTree) -> TrainState:
        state, grads = to_replica(state, spec), to_replica(rows, PER_REPLICA)
        params, inner = sync.update(grads, state.sync, state.params)[:2]
        return from_replica(state._replace(params=params, sync=inner), spec)

    def row(spec: Any, leaf: Any) -> Any:
        shape = leaf.shape if spec == PER_REPLICA else (mesh.size, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    rows = by_spec(lambda leaf, one: row(one, leaf), state.params, sync.params_spec)
    with explained(f"with comm={comm!r}"):
        mapped = sync_map(update, mesh, (spec, PER_REPLICA), spec)
        after = jax.eval_shape(lambda state, rows: mapped(sync.fetch(state), rows), state, rows)
        if not _alike([state.params, state.sync], [after.params, after.sync]):
            raise TypeError(
                "its update gives parameters or a state of other shapes or types than it was given."
            )


def _alike(one: PyTree, other: PyTree) -> bool:
    if not _same_tree(one, other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def _constants(traced: ClosedJaxpr) -> Iterator[Any]:
    """Values that were written into the program instead of given to it, those of inner functions too."""
    yield from traced.consts
    for eqn in traced.jaxpr.eqns:
        yield from (v.val for v in eqn.invars if isinstance(v, Literal))
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                if isinstance(one, ClosedJaxpr | Jaxpr):
                    yield from _constants(one if isinstance(one, ClosedJaxpr) else ClosedJaxpr(one, ()))


def _differs_by_place(value: Any) -> bool:
    if np.size(value) < 2 or jax.dtypes.issubdtype(getattr(value, "dtype", bool), jax.dtypes.prng_key):
        return False  # what a key is used for is seen as an operation
    array = np.asarray(value)
    return bool((array != array.flat[0]).any())


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All equations, those of inner functions in place of the call."""
    for eqn in jaxpr.eqns:
        inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
        for one in inner:
            yield from _equations(one)
        if not inner or eqn.primitive.name == "scan":
            yield eqn


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    for one in value if isinstance(value, tuple | list) else (value,):
        if isinstance(one, ClosedJaxpr):
            yield one.jaxpr
        elif isinstance(one, Jaxpr):
            yield one


def _operations(jaxpr: Jaxpr) -> Iterator[str]:
    """Names of what is done to arrays; what is done to scalars alone (counters, schedules) is anybody's."""
    for eqn in _equations(jaxpr):
        name, shapes = eqn.primitive.name, [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        if name == "scan":
            # A loop that carries arrays may be elementwise; one that runs over their rows is not.
            first = eqn.params["num_consts"] + eqn.params["num_carry"]
            over = [*eqn.invars[first:], *eqn.outvars[eqn.params["num_carry"] :]]
            if over:
                yield name
        elif any(shapes):
            grown = name == "broadcast_in_dim" and shapes[0] and np.prod(shapes[0]) != np.prod(shapes[-1])
            yield "broadcast of an array" if grown else name


def _signature(jaxpr: Jaxpr) -> Counter:
    """How often each operation and each constant occurs, but for those that only shape."""
    found: Counter = Counter()
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        found.update([name] if name not in _SHAPING else [])
        found.update(repr(v.val) for v in eqn.invars if isinstance(v, Literal) and name != "reshape")
    return found


def _without_constants(signature: Counter) -> dict[str, int]:
    return {name: count for name, count in signature.items() if name.isidentifier()}


def _same_tree(one: PyTree, other: PyTree) -> bool:
    trees: Any = jax.tree.structure(one), jax.tree.structure(other)
    return trees[0] == trees[1]


def _same_states(optimizer: Any, whole: PyTree, parts: PyTree, cut: Callable) -> bool:
    a, b = (jax.eval_shape(optimizer.init, tree) for tree in (whole, parts))
    if not _same_tree(a, b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(part.shape in ((), cut(leaf.shape)) and leaf.dtype == part.dtype for leaf, part in pairs)


def refuse_without_gradient(params: PyTree) -> None:
    """Raises: ConfigError naming a parameter that is no real or complex number."""
    for name, leaf in named_leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ConfigError(
                f"parameter {name!r} is {leaf.dtype}: it has no gradient. HINT: keep it "
                'beside the parameters, self.variable("constants", ...) in linen, nnx.Variable in nnx.'
            )
