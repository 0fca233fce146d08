"""Common metrics, ready for `cx.Metrics` or a `cx.Task`; each has the value of one device.

`top_k` and `per_class` give a value and a weight per position. The others need all samples and give a
`Statistic`, whose sums are float32 within a step (counts are exact up to 2^24 samples or tokens per step)
and float64 over the steps.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cyxjax.core.metrics import Metric, counts
from cyxjax.core.statistics import Statistic, of_sums
from cyxjax.core.trees import kind_of
from cyxjax.errors import ConfigError, DataError


def top_k(k: int, *, ignore_index: int | None = None) -> Metric:
    """1 where the label is among the `k` largest logits (B, ..., C); a tie counts in favour of the label.

    ignore_index: a label that is left out. A label that is not a class is a miss, and so are logits of NaN.
    """

    def hits(output: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = counts(target, ignore_index)
        label = jnp.where(kept, target, 0).astype(jnp.int32)
        own = jnp.take_along_axis(output, label[..., None], axis=-1)
        # NaN is above every logit
        return _where(((~(output <= own)).sum(-1) < k) & (label < output.shape[-1]), kept)

    return hits


def per_class(names: Sequence[str], *, ignore_index: int | None = None) -> dict[str, Metric]:
    """{"recall_<name>": ..., "precision_<name>": ...} of each class, `names` in the order of the logits.

    recall: the part of the samples of a class that were predicted as it; precision: the part of the samples
    predicted as a class that belong to it. NaN where there are none.
    """

    def recall(number: int) -> Metric:
        return lambda output, target: _where(
            output.argmax(-1) == number, (target == number) & counts(target, ignore_index)
        )

    def precision(number: int) -> Metric:
        guessed = lambda output, target: (output.argmax(-1) == number) & counts(target, ignore_index)  # noqa: E731
        return lambda output, target: _where(target == number, guessed(output, target))

    made = {f"recall_{name}": recall(number) for number, name in enumerate(names)}
    return made | {f"precision_{name}": precision(number) for number, name in enumerate(names)}


def _where(right: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    return right.astype(jnp.float32), counts.astype(jnp.float32)


_AVERAGES = ("macro", "micro", "weighted", "binary", None)
_SIGNIFICANT = 1e-5  # of a sum of squares: below this part, a difference of squares is float32 rounding


def ConfusionMatrix(num_classes: int, *, ignore_index: int | None = None) -> Statistic:
    """float64 (C, C): the number of samples of class i (row) that were predicted as class j (column)."""

    def counted(output: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
        label, guess, weights = _labelled(output, target, weight, num_classes, ignore_index)
        return jnp.zeros((num_classes, num_classes)).at[label, guess].add(weights, mode="drop")

    return of_sums((num_classes, num_classes), counted, lambda state: state)


def F1(num_classes: int = 2, average: str | None = "macro", *, ignore_index: int | None = None) -> Statistic:
    """2 * true positives / (predicted + actual positives), averaged over classes.

    average: "macro" is the mean over the classes that occur, "weighted" weights them by their frequency;
    "micro" counts all classes together; "binary" is F1 of class 1; None gives each, as <name>_<class>.
    Source: sklearn.metrics.f1_score.
    """
    if average not in _AVERAGES or (average == "binary" and num_classes != 2):
        raise ConfigError(
            f"F1({num_classes}, average={average!r}): expected an average of {_AVERAGES}, and 2 classes for "
            "'binary'. HINT: write F1(10, 'macro')."
        )

    def counted(output: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
        label, guess, weights = _labelled(output, target, weight, num_classes, ignore_index)
        by_class = lambda place, w: jnp.zeros(num_classes).at[place].add(w, mode="drop")  # noqa: E731
        hits = jnp.where(label == guess, weights, 0.0)
        return jnp.stack([by_class(label, hits), by_class(guess, weights), by_class(label, weights)])

    def compute(state: np.ndarray) -> Any:
        right, predicted, actual = state
        if average == "micro":
            return 2 * right.sum() / (predicted.sum() + actual.sum())
        each = 2 * right / (predicted + actual)  # NaN for a class that does not occur
        if average is None:
            return dict(enumerate(each))
        if average == "binary":
            return each[1]
        occurs = predicted + actual > 0
        weights = actual[occurs] if average == "weighted" else occurs[occurs].astype(float)
        return (each[occurs] * weights).sum() / weights.sum()

    return of_sums((3, num_classes), counted, compute, "max")


def AUC(bins: int = 1000, *, positive: int | None = None, ignore_index: int | None = None) -> Statistic:
    """Area under the ROC curve, binned: how often a positive sample scores above a negative one.

    Scores are counted in `bins` bins by the sigmoid of score / 4. A pair in the same bin counts one half, so
    the result is off by at most half the fraction of pairs that share a bin. Output: logits (B,), (B, 1) or
    (B, 2) for labels 0 and 1, or (B, C), where class `positive` is compared with all others; more than two
    classes need it. Labels below 0 and `ignore_index` are left out.
    """

    def counted(output: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
        score, label = _score(output, target, positive)
        weight = jnp.where(counts(target.reshape(-1), ignore_index), weight, 0.0)
        place = jnp.clip((jax.nn.sigmoid(score / 4) * bins).astype(jnp.int32), 0, bins - 1)
        weights = jnp.where(jnp.isfinite(score), weight, jnp.where(weight > 0, jnp.nan, 0.0))
        return jnp.zeros((2, bins)).at[label, place].add(weights)

    def compute(state: np.ndarray) -> Any:
        negative, positives = state
        below = np.cumsum(negative) - negative / 2
        return (positives * below).sum() / (positives.sum() * negative.sum())

    return of_sums((2, bins), counted, compute, "max")


def Perplexity(*, ignore_index: int | None = None) -> Statistic:
    """exp of the mean cross entropy of logits (B, ..., C), over all labels (B, ...) that count."""
    return of_sums((2,), _entropy(ignore_index), lambda state: np.exp(state[0] / state[1]), "min")


def BitsPerCharacter(characters_per_token: float = 1.0, *, ignore_index: int | None = None) -> Statistic:
    """The mean cross entropy in bits per character, for labels of `characters_per_token` characters each."""
    per_token = np.log(2.0) * characters_per_token
    return of_sums((2,), _entropy(ignore_index), lambda state: state[0] / state[1] / per_token, "min")


def R2(num_outputs: int = 1, *, around: float = 0.0) -> Statistic:
    """1 - squared error / variance of the targets; averaged over outputs (B, num_outputs).

    around: a number near the targets, subtracted before squares are summed. NaN where the targets are so far
    from it (300 times their spread) that float32 cannot resolve their variance.
    Source: sklearn.metrics.r2_score.
    """

    def counted(output: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
        y, p = (a.astype(jnp.float32).reshape(-1, num_outputs) for a in (target, output))
        w, y = weight[:, None], jnp.where(weight[:, None] > 0, y - around, 0.0)
        gap = jnp.where(w > 0, p - around - y, 0.0)
        return jnp.stack([(w * a).sum(0) for a in (jnp.ones_like(y), y, y * y, gap * gap)])

    def compute(state: np.ndarray) -> Any:
        count, total, squares, error = state
        spread = squares - total**2 / count
        return np.mean(1 - error / np.where(spread > _SIGNIFICANT * squares, spread, np.nan))

    return of_sums((4, num_outputs), counted, compute, "max")


def _labelled(
    output: jax.Array, target: jax.Array, weight: jax.Array, num_classes: int, ignore_index: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(label, prediction, weight) of each position, flat; positions that do not count have weight 0."""
    if not all(hasattr(one, "shape") for one in (output, target)):
        raise DataError(
            f"a metric of {num_classes} classes got {kind_of(output)} and {kind_of(target)}. HINT: "
            'cx.Task(loss, output="NAME", target="NAME") picks the parts that loss and metrics see.'
        )
    if output.shape == (*target.shape, num_classes):
        guess = jnp.argmax(output, -1)
    elif num_classes == 2 and output.shape in (target.shape, (*target.shape, 1)):
        guess = (output.reshape(target.shape) > 0).astype(jnp.int32)
    else:
        raise DataError(
            f"a metric of {num_classes} classes got output {list(output.shape)} and target "
            f"{list(target.shape)}, which do not fit. HINT: the last dimension of the output is the classes."
        )
    weights = _of_positions(target, weight, ignore_index)
    label = jnp.where(weights > 0, target.astype(jnp.int32), 0)
    return label.ravel(), guess.ravel(), weights.ravel()


def _of_positions(target: jax.Array, weight: jax.Array, ignore_index: int | None) -> jax.Array:
    """The `weight` of its sample at each position; 0 at ignored positions."""
    weights = jnp.broadcast_to(weight.reshape(-1, *[1] * (target.ndim - 1)), target.shape)
    return jnp.where(counts(target, ignore_index), weights, 0.0)


def _score(output: jax.Array, target: jax.Array, positive: int | None) -> tuple[jax.Array, jax.Array]:
    """(log odds of the positive class, 1 where the label is that class) of each sample, (B,)."""
    output, target = output.astype(jnp.float32), target.reshape(-1)
    if output.ndim == 2 and output.shape[1] > 1:
        if positive is None and output.shape[1] > 2:
            raise DataError(
                f"AUC of {output.shape[1]} classes compares one of them with the others. HINT: name it, "
                "cx.AUC(positive=1); for several, give each a name in cx.Metrics."
            )
        positive = 1 if positive is None else positive
        rest = jnp.delete(output, positive, axis=1)
        return output[:, positive] - jax.nn.logsumexp(rest, axis=1), (target == positive).astype(jnp.int32)
    return output.reshape(-1), (target > 0).astype(jnp.int32)


def _entropy(ignore_index: int | None) -> Any:
    """Counts (sum of cross entropies, number of labels); a label that is not a class makes the sum NaN."""

    def counted(output: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
        weights, classes = _of_positions(target, weight, ignore_index), output.shape[-1]
        label = jnp.where(weights > 0, target.astype(jnp.int32), 0)
        log_p = jax.nn.log_softmax(output.astype(jnp.float32))
        picked = jnp.take_along_axis(log_p, jnp.minimum(label, classes - 1)[..., None], axis=-1)[..., 0]
        each = jnp.where(label < classes, -picked, jnp.nan)
        return jnp.stack([jnp.where(weights > 0, weights * each, 0.0).sum(), weights.sum()])

    return counted
