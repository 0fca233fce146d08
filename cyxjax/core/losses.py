"""Losses with torch's names: one value per example (`per_example`), so that padding can have zero weight.

`forward` and `backward` compute the batch mean and its gradient, as in torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from cyxjax.core.makers import maker_of
from cyxjax.core.mesh import refuse_wrapping
from cyxjax.core.rows import by_sample, check_form, is_whole_batch, mean_of_each, num_rows, whole_batch
from cyxjax.core.trees import PyTree, as_labels, kind_of, owned
from cyxjax.errors import DataError

PerExample = Callable[[PyTree, PyTree], Any]
"""(output (B, ...), target (B, ...)) -> float32 (B,); or (values, weights), each (B, ...), whose weighted
mean over the global batch is the loss of a step; or one number for all rows (see `core/rows.py`)."""
_Fn = TypeVar("_Fn", bound=Callable)


@dataclass(frozen=True)
class Loss(ABC):
    """Base class of losses: the batch mean and its gradient, from the subclass's `per_example`."""

    @abstractmethod
    def per_example(self, output: jax.Array, target: jax.Array) -> Any:
        """One loss per example: float32 (B,); further dimensions are averaged. Or (values, weights)."""

    def forward(self, output: jax.Array, target: jax.Array) -> jax.Array:
        """The mean over the batch: float32, shape (). Raises: DataError for a label beyond int32."""
        refuse_wrapping(target)
        return _mean(self, jnp.asarray(output), jnp.asarray(owned(target)))

    def backward(self, output: jax.Array, target: jax.Array) -> jax.Array:
        """Gradient of `forward` with respect to `output`, of its shape and dtype. Raises: as `forward`."""
        refuse_wrapping(target)
        return _mean_grad(self, jnp.asarray(output), jnp.asarray(owned(target)))

    def __call__(self, output: jax.Array, target: jax.Array) -> Any:
        """`forward`; for the output of a wrapped model, a loss with `.backward()`, as in torch."""
        maker = maker_of(output)
        return maker.loss(self, output, target) if maker else self.forward(output, target)


def compiled_for_ours(fn: _Fn) -> _Fn:
    """`fn` (loss, ...), compiled for the losses of this file and for None, the model's own loss.

    These are immutable. Other losses may read what changes from call to call, so `fn` is not compiled.
    """
    compiled = jax.jit(fn, static_argnums=0)

    @wraps(fn)
    def run(loss: Any, *args: Any) -> Any:
        refuse_wrapping(args)
        is_ours = loss is None or (isinstance(loss, Loss) and type(loss).__module__ == __name__)
        return (compiled if is_ours else fn)(loss, *owned(args))

    return cast(_Fn, run)


@compiled_for_ours
def _mean(loss: Loss, output: jax.Array, target: jax.Array) -> jax.Array:
    return batch_mean(loss.per_example(output, target))


def batch_mean(given: Any) -> jax.Array:
    """The mean of values; for (values, weights) the weighted mean; 0 where nothing counts."""
    if not isinstance(given, tuple):
        return given.mean() if given.size else given.sum()
    values, weights = by_sample(*given)
    total = weights.sum()
    return values @ weights / jnp.where(total != 0, total, 1.0)


_mean_grad = compiled_for_ours(jax.grad(_mean, argnums=1))


def _no_class_is_nan(labels: jax.Array) -> jax.Array:
    """`labels`, with negative ones out of range so that their loss is NaN: jax would index from the end."""
    return jnp.where(labels < 0, jnp.iinfo(jnp.int32).max, labels)


@dataclass(frozen=True)
class CrossEntropyLoss(Loss):
    """-log softmax(output)[target] for logits (B, ..., C) and labels (B, ...), integers or
    booleans, or probabilities (B, ..., C).

    Source: torch.nn.CrossEntropyLoss (classes last, as in Flax, where torch has them second). A batch whose
    labels are all ignored has loss 0, where torch has NaN. A label whose class has weight 0 is left out;
    torch keeps its share of `label_smoothing`.
    """

    weight: Sequence[float] | None = None
    """Weight of each class: the mean is sum(weight[target] * loss) / sum(weight[target]), as in torch."""
    ignore_index: int | None = None
    """A label that is left out of the mean, such as padding in a text (torch's default is -100)."""
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.weight is not None:
            # Hashable: a loss is part of the key of compiled programs.
            object.__setattr__(self, "weight", tuple(float(w) for w in np.asarray(self.weight).ravel()))

    def per_example(self, output: jax.Array, target: jax.Array) -> Any:
        """float32 (B,); for labels with `weight` or `ignore_index`, (values, weights), each (B, ...)."""
        target = _fitting(self, output, target, labels=True)
        logits = output.astype(jnp.float32)
        if jnp.issubdtype(target.dtype, jnp.integer):
            values, weights = self._of_labels(logits, target)
            is_plain = self.weight is None and self.ignore_index is None
            return mean_of_each(values) if is_plain else (values, weights)
        smooth = self.label_smoothing / output.shape[-1]
        target = target * (1 - self.label_smoothing) + smooth
        target = target if self.weight is None else target * self._class_weight(target.shape)
        return mean_of_each(optax.softmax_cross_entropy(logits, target))

    def _class_weight(self, shape: tuple[int, ...]) -> jax.Array:
        """float32 (..., C), of this shape: the weight of each class."""
        return jnp.broadcast_to(jnp.float32(1.0 if self.weight is None else self.weight), shape)

    def _of_labels(self, logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(losses, weights), each of the shape of `target`."""
        counts = jnp.ones(target.shape, bool) if self.ignore_index is None else target != self.ignore_index
        label = _no_class_is_nan(jnp.where(counts, target, 0))  # ignored: any valid class
        values = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        own = (
            jnp.float32(1.0)  # without a look-up, which costs a tenth of the time to compile a step
            if self.weight is None
            else self._class_weight(logits.shape[-1:]).at[label].get(mode="fill", fill_value=1.0)
        )
        weights = jnp.where(counts, own, 0.0)
        if self.label_smoothing:  # of all classes, while the mean divides by the labels' weights, as in torch
            each = -self._class_weight(logits.shape) * jax.nn.log_softmax(logits)
            spread = each.mean(-1) / jnp.where(weights != 0, weights, 1.0)
            values = (1 - self.label_smoothing) * values + self.label_smoothing * spread
        return values, weights


@dataclass(frozen=True)
class NLLLoss(Loss):
    """-output[target] for log-probabilities (B, ..., C) and labels (B, ...)."""

    def per_example(self, output: jax.Array, target: jax.Array) -> jax.Array:
        target = _fitting(self, output, target, labels=True)
        return mean_of_each(-jnp.take_along_axis(output, _no_class_is_nan(target)[..., None], axis=-1))


@dataclass(frozen=True)
class MSELoss(Loss):
    """(output - target)^2, averaged over all dimensions but the first."""

    def per_example(self, output: jax.Array, target: jax.Array) -> jax.Array:
        return mean_of_each(jnp.square(_difference(self, output, target)))


@dataclass(frozen=True)
class L1Loss(Loss):
    """|output - target|, averaged over all dimensions but the first."""

    def per_example(self, output: jax.Array, target: jax.Array) -> jax.Array:
        d = _difference(self, output, target)
        return mean_of_each(d * lax.stop_gradient(jnp.sign(d)))  # the gradient at 0 is 0; that of `abs` is 1


@dataclass(frozen=True)
class HuberLoss(Loss):
    """Quadratic to |d| = delta, linear beyond. Source: torch.nn.HuberLoss."""

    delta: float = 1.0

    def per_example(self, output: jax.Array, target: jax.Array) -> jax.Array:
        d = jnp.abs(_difference(self, output, target))
        return mean_of_each(jnp.where(d <= self.delta, 0.5 * d * d, self.delta * (d - 0.5 * self.delta)))


@dataclass(frozen=True)
class BCEWithLogitsLoss(Loss):
    """Binary cross-entropy of sigmoid(output) against targets in [0, 1] of the same shape."""

    def per_example(self, output: jax.Array, target: jax.Array) -> jax.Array:
        target = _fitting(self, output, target).astype(jnp.float32)
        return mean_of_each(optax.sigmoid_binary_cross_entropy(output.astype(jnp.float32), target))


def model_loss(output: PyTree, target: PyTree) -> Any:
    """The per-example loss of a model that returns `{"loss": ...}`, with its "weight" if it has one."""
    if not isinstance(output, dict) or "loss" not in output:
        raise DataError(
            f"the model returned {kind_of(output)}, expected a dict with the key 'loss', because "
            "no loss function was given. HINT: pass a loss such as cx.CrossEntropyLoss() to the trainer, or "
            'return {"loss": values}, one per sample, from a model that computes its own loss.'
        )
    return (output["loss"], output["weight"]) if "weight" in output else output["loss"]


@dataclass(frozen=True, eq=False)
class UserLoss:
    """A user's callable as `PerExample`. Raises: DataError, while tracing, for a result of the wrong form."""

    fn: Callable[[PyTree, PyTree], Any]

    def __call__(self, output: PyTree, target: PyTree) -> Any:
        values = self.fn(output, target)
        batch = num_rows((output, target))
        check_form(values, batch)
        if isinstance(values, tuple):
            return by_sample(*values)
        if values.ndim:
            return mean_of_each(values)
        if self.fn is model_loss and not is_whole_batch():
            raise DataError(
                f"the model's own loss is one number for {batch} samples, which are a part of the batch; "
                "expected one value per sample. HINT: return {'loss': values} with values of shape (B,)."
            )
        return values


def as_per_example(loss: Any) -> PerExample:
    """The function that the step calls, from a `Loss`, any callable, or None (the model's own loss)."""
    if hasattr(loss, "to_per_example") and not isinstance(loss, type):
        return loss.to_per_example()
    if isinstance(loss, type) or not (loss is None or callable(loss)):
        raise DataError(f"{loss!r} is not a loss. HINT: pass a function or an object: cx.CrossEntropyLoss().")
    return loss.per_example if hasattr(loss, "per_example") else UserLoss(loss or model_loss)


def of_batch(loss: Any, output: PyTree, target: PyTree) -> jax.Array:
    """The loss of one process's batch, (): the number that a callable returns, or the mean of its values.

    For hand-written loops, which have no padding: the callable is used exactly as it is written.
    """
    per_example = as_per_example(loss)
    own_mean = getattr(per_example, "batch_mean", None)
    with whole_batch():
        value = own_mean(output, target) if own_mean else batch_mean(per_example(output, target))
    return value.astype(jnp.float32)


def _difference(loss: Loss, output: jax.Array, target: jax.Array) -> jax.Array:
    target = _fitting(loss, output, target)
    return output.astype(jnp.float32) - target.astype(jnp.float32)


def _fitting(loss: Loss, output: Any, target: Any, labels: bool = False) -> jax.Array:
    """`target`, checked against `output`; with `labels`, booleans become integers.

    Labels lack the last dimension of `output`, which has two classes or more; other targets have its shape.
    Raises: DataError unless both are real arrays whose shapes fit: others would broadcast, or lose a part,
    and the loss of a single class is always zero.
    """
    is_single = labels and getattr(output, "shape", ())[-1:] == (1,)
    if not is_single and all(hasattr(a, "dtype") and not jnp.iscomplexobj(a) for a in (output, target)):
        target = as_labels(target) if labels else target
        is_label = labels and jnp.issubdtype(target.dtype, jnp.integer)
        if target.shape == (output.shape[:-1] if is_label else output.shape):
            return target
    raise DataError(
        f"{type(loss).__name__}: the output is {kind_of(output)} and the target {kind_of(target)}, which do "
        "not fit. HINT: labels are integers without the class dimension (y[:, 0] for shape (N, 1), "
        "y.argmax(-1) for one-hot rows) and need an output per class (for one logit: BCEWithLogitsLoss); "
        "other targets are real arrays of the output's shape (y[:, None] for outputs (N, 1)); "
        "cx.Task(loss, output=...) picks one of several outputs."
    )
