"""Whether a loss is a mean of one value a sample: asked before training, of outputs made up for it.

The step gives each sample a weight (padding has none, shards may be uneven), so it needs a value a sample.
A loss that compares samples with each other, or divides by something of the whole batch, has none: taken
sample by sample it would train on other numbers, and say nothing.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.losses import PerExample, UserLoss, each_alone
from cyxjax.core.mesh import REPLICATED, build_mesh
from cyxjax.core.objective.aux_probe import refuse_hits
from cyxjax.core.objective.global_loss import GlobalLoss
from cyxjax.core.objective.host import on_host
from cyxjax.core.objective.loss_forms import check_form
from cyxjax.core.objective.own_loss import is_the_models_own
from cyxjax.core.objective.probes import nudged, num_samples, probes
from cyxjax.core.replica import model_map
from cyxjax.core.rows import by_sample
from cyxjax.core.trees import batch_shapes
from cyxjax.errors import ConfigError

PyTree = Any

_FINE, _COARSE = 1e-4, 0.03  # how far rounding may part two ways to a number; in half precision
_WAYS = (
    "HINT: return one value a sample, shape (B,), that depends on this sample alone; for class weights or a "
    "mask the pair (values, weights), without the division; one that compares samples is cx.GlobalLoss(loss)."
)


def needs_probe(loss: PerExample) -> bool:
    """Whether `loss` is a function of the user's."""
    if any(needs_probe(term.loss) for term in getattr(loss, "terms", ())):
        return True
    return isinstance(loss, GlobalLoss) or (isinstance(loss, UserLoss) and not is_the_models_own(loss))


def refuse_unless_mean(
    loss: PerExample, output: PyTree, target: PyTree, batch_size: int = 1, *, learns: bool = True
) -> None:
    """Returns for a loss whose value for a batch is the mean of its values for each sample alone, and that
    has a gradient (unless it need not be one that `learns`: weights).

    output: the model's, as shapes (n, ...), any n. target: real samples', the more unlike the better.
    batch_size: of training, tried where the loss takes no small batch. Losses of ours need no probe; one that
    cannot be traced is left to the step, which says why; a probe that is NaN on both sides proves nothing.
    Raises: ConfigError for a loss that couples samples, in its value or its gradient; DataError for one that
        gives neither a value a sample nor one for all.
    """
    for term in getattr(loss, "terms", ()):
        refuse_unless_mean(term.loss, output, target, batch_size, learns=False)  # one may be there to be seen
    if not needs_probe(loss) or not isinstance(loss, UserLoss):
        return
    with on_host() as device:
        # A loss may name the axis.
        on_axis = lambda f: model_map(f, build_mesh([device]), (REPLICATED, REPLICATED), REPLICATED)  # noqa: E731
        whole, alone = on_axis(loss.fn), on_axis(partial(each_alone, loss.fn))
        for size in dict.fromkeys((num_samples(output), batch_size)):
            shapes = batch_shapes(output, size), batch_shapes(target, size)
            if traced(whole, *shapes):
                break
        else:
            return
        form = jax.eval_shape(whole, *shapes)
        check_form(form, size)
        _refuse_complex(form)
        if isinstance(form, tuple):
            refuse_hits(on_axis(lambda o, t: loss.fn(o, t)[1]), probes(output, target, size))
            _refuse_negative(on_axis(of_pair(loss.fn)[1]), probes(output, target, size))
            for one, learned in zip(of_pair(loss.fn), (learns, False), strict=True):
                refuse_unless_mean(UserLoss(one), output, target, size, learns=learned)
            return
        if not traced(alone, *shapes):
            raise ConfigError(f"the loss takes {size} samples but not one alone. {_WAYS}")
        both = jax.jit(lambda o, t: (whole(o, t), alone(o, t)))
        slopes = [on_axis(_slopes(run)) for run in (loss.fn, partial(each_alone, loss.fn))]
        has_slopes = all(traced(run, *shapes) for run in slopes)
        both_slopes = jax.jit(lambda o, t: tuple(run(o, t) for run in slopes))
        text = str(jax.make_jaxpr(whole)(*shapes))
        relative = _COARSE if any(kind in text for kind in ("bf16[", "f16[", "f8_")) else _FINE
        tried = list(probes(output, target, size))
        for probe in tried:
            found = _differing(both, *probe, relative)
            if found is not None:
                _refuse_spread(*shapes)
                raise ConfigError(_said(bool(jax.eval_shape(whole, *shapes).ndim), size, *found))
            if has_slopes and not _same_slopes(both_slopes, *probe, relative):
                raise ConfigError(
                    f"the loss of {size} samples is the mean of their losses alone, but its gradient is not: "
                    f"a sample's depends on the others (stop_gradient, or a gradient of its own). {_WAYS}"
                )
        if learns and has_slopes:
            _refuse_flat(both, both_slopes, tried)


def _refuse_complex(form: PyTree) -> None:
    if any(jnp.issubdtype(one.dtype, jnp.complexfloating) for one in jax.tree.leaves(form)):
        raise ConfigError(
            "the loss is complex; what goes downhill is a real number. HINT: jnp.abs(z) ** 2, or z.real."
        )


def _refuse_spread(output: PyTree, target: PyTree) -> None:
    """Raises: ConfigError for (N, 1) and (N,), of which numpy's rules make (N, N): each with all others."""
    first, second = (tuple(getattr(one, "shape", ())) for one in (output, target))
    if sorted((first[1:], second[1:])) == [(), (1,)]:
        mend = "y[:, None]" if len(first) == 2 else "y[:, 0]"
        raise ConfigError(
            f"the loss compares each sample with all: the output {first} and the target {second} are spread "
            f"over each other to ({first[0]}, {first[0]}). HINT: give the target as {mend}."
        )


def _refuse_flat(both: Callable, slopes: Callable, tried: list) -> None:
    """Raises: ConfigError for a loss whose values differ, and whose gradient is 0 wherever it was tried."""
    values: set[float] = set()
    for probe in tried:
        if any(np.any(leaf) for leaf in jax.tree.leaves(slopes(*probe))):
            return
        values.update(_values(*both(*probe))[0].tolist())
    if len(values) > 1:  # a constant is meant as one
        raise ConfigError(
            "the loss has no gradient: it is 0 for every output tried, so that nothing would be learned. "
            "HINT: compare logits or values, not what argmax, round, a comparison or stop_gradient gave."
        )


def refuse_unless_blind(loss: Any, output: PyTree, target: PyTree) -> None:
    """Returns for a loss over the global batch that takes no notice of what padding holds.

    output, target: as of `refuse_unless_mean`. Raises: ConfigError with both values.
    """
    if not isinstance(loss, GlobalLoss) or not loss.takes_padding:
        return
    size = 6
    shapes = (
        batch_shapes(output, size),
        batch_shapes(target, size),
        jax.ShapeDtypeStruct((size,), jnp.float32),
    )
    if not traced(loss.of_batch, *shapes):
        return  # the step says why
    with on_host():
        alone = jax.jit(loss.of_batch)
        for outputs, targets in probes(output, target, size):
            longer = jax.tree.map(_with_padding, (outputs, targets))
            weight = np.array([1] * size + [0] * 2, np.float32)
            short, long = float(alone(outputs, targets, weight[:size])), float(alone(*longer, weight))
            if np.isfinite(short) and not np.isclose(short, long, rtol=1e-3, atol=1e-6):
                raise ConfigError(
                    f"the global loss of {size} samples is {short:.4g}, and {long:.4g} with two rows of "
                    "padding: weight 0 must not be seen. HINT: weigh every sum over the batch, as "
                    "(weight * v).sum() / weight.sum(), and mask padded columns with -inf."
                )


def _with_padding(leaf: np.ndarray) -> np.ndarray:
    return np.concatenate([leaf, leaf[:2]]) if leaf.ndim else leaf


def _refuse_negative(weights: Callable, probes: Iterator[tuple[PyTree, PyTree]]) -> None:
    run = jax.jit(weights)
    least = min(float(np.min(np.asarray(run(*probe)), initial=0.0)) for probe in probes)
    if least < 0:
        raise ConfigError(
            f"the loss weighs a sample {least:.4g}; a mean takes weights of 0 and more. HINT: put the sign "
            "into the values."
        )


def of_pair(fn: Callable) -> tuple[Callable, Callable]:
    """(values that are weighed, weights) of a loss that gives both: each a value a sample."""

    def values(output: PyTree, target: PyTree) -> jax.Array:
        value, weight = by_sample(*fn(output, target))
        return value * weight

    return values, lambda output, target: by_sample(*fn(output, target))[1]


def _slopes(run: Callable) -> Callable:
    """(output, target) -> the gradient of the mean of `run`'s values with respect to output's real leaves."""

    def slopes(output: PyTree, target: PyTree) -> list[jax.Array]:
        leaves, form = jax.tree.flatten(output)
        is_real = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

        def mean(real: list[jax.Array]) -> jax.Array:
            given = iter(real)
            mixed = [next(given) if is_r else leaf for is_r, leaf in zip(is_real, leaves, strict=True)]
            return run(jax.tree.unflatten(form, mixed), target).astype(jnp.float32).mean()

        return jax.grad(mean)([leaf for is_r, leaf in zip(is_real, leaves, strict=True) if is_r])

    return slopes


def _same_slopes(both: Callable, output: PyTree, target: PyTree, relative: float) -> bool:
    """Whether two ways to the gradient differ by no more than rounding does, leaf by leaf."""
    whole, alone = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), both(output, target))
    beside = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), both(nudged(output), target))
    for a, b, *moved in zip(whole, alone, *beside, strict=True):
        with np.errstate(invalid="ignore"):
            noise = np.nan_to_num(np.abs(a - moved[0]) + np.abs(b - moved[1]), posinf=0.0)
            largest = np.max(np.abs(np.concatenate([a.ravel(), b.ravel()])), initial=0.0)
            allowed = relative * np.nan_to_num(largest, nan=np.inf) + 30 * noise + 1e-6
            if (np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) > allowed)).any():
                return False
    return True


def _differing(both: Callable, output: PyTree, target: PyTree, relative: float) -> tuple[float, float] | None:
    """(the batch's value, the samples' own) where they differ by more than rounding does; None if nowhere."""
    whole, alone = _values(*both(output, target))
    beside, beside_alone = _values(*both(nudged(output), target))
    with np.errstate(invalid="ignore"):
        noise = np.nan_to_num(np.abs(whole - beside) + np.abs(alone - beside_alone), posinf=0.0)
        allowed = relative * np.maximum(np.abs(whole), np.abs(alone)) + 30 * noise + 1e-6
        odd = np.isfinite(whole) & ~(np.isfinite(alone) & (np.abs(whole - alone) <= allowed))
    return (float(whole[odd][0]), float(alone[odd][0])) if odd.any() else None


def _values(values: jax.Array, alone: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """(value of the batch, mean of the samples' own), float64 (1,); or both sample by sample, (B,)."""
    a, b = np.asarray(values, np.float64), np.asarray(alone, np.float64)
    own = b.reshape(len(b), -1).mean(1)
    return (a[None], own.mean(keepdims=True)) if a.ndim == 0 else (a.reshape(len(a), -1).mean(1), own)


def _said(by_sample: bool, count: int, whole: float, alone: float) -> str:
    if by_sample:
        return (
            f"the loss of a sample is {whole:.4g} in a batch of {count} and {alone:.4g} alone: it depends on "
            f"the other samples, so also on padding and on the number of replicas. {_WAYS}"
        )
    if abs(whole - alone * count) < 1e-3 * abs(whole):
        return (
            f"the loss of {count} samples is their sum, {whole:.4g}; a step takes their mean, {alone:.4g}, "
            "which does not grow with the batch. HINT: leave out the final sum: return one value a sample."
        )
    return (
        f"the loss of {count} samples is {whole:.4g}, but the mean of their losses alone is {alone:.4g}: it "
        f"is no mean of one value a sample, and would train on other numbers. {_WAYS}"
    )


def traced(run: Callable, *shapes: PyTree) -> bool:
    try:
        jax.eval_shape(run, *shapes)
    except Exception:  # whatever a user's function raises
        return False
    return True
