"""A task: the losses and metrics of a run, and the parts of output and target that they see."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from cyxjax.core.losses import (
    CrossEntropyLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    PerExample,
    UserLoss,
    as_per_example,
)
from cyxjax.core.metrics import Metric, Metrics, accuracy
from cyxjax.core.objective.global_loss import ContrastiveLoss, GlobalLoss, sees_whole_batch
from cyxjax.core.objective.terms import SumOfTerms, Term, num_means
from cyxjax.core.rows import flat_rows, mean_of_each
from cyxjax.core.statistics import Statistic
from cyxjax.core.trees import PyTree
from cyxjax.errors import ConfigError

Pick: TypeAlias = "str | int | Callable[[PyTree], PyTree] | None"
"""Selects a part of a tree: a key, an index, a field's name, or a function; None selects all of it."""


@dataclass(frozen=True, eq=False)
class Task:
    """What a trainer takes in place of a loss: `DistributedTrainer(model, task, optimizer)`.

    loss: a loss as for the trainer, or {name: loss}, {name: (loss, factor)}, {name: cx.Term(...)}: their
    weighted sum, where each loss has its own mean and each of several is measured under its name. output,
    target: the parts of the model's output and of the target that losses and metrics see, also those metrics
    that are given to the trainer. metrics, better: as in `cx.Metrics`.
    """

    loss: Any
    output: Pick = None
    target: Pick = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    better: Mapping[str, str] = field(default_factory=dict)

    @property
    def ignore_index(self) -> int | None:
        """The label that losses and accuracy leave out, or None."""
        found = [getattr(term.loss, "ignore_index", None) for term in self._terms]
        return next((index for index in found if index is not None), None)

    @property
    def _terms(self) -> list[Term]:
        if not isinstance(self.loss, Mapping):
            return [Term(self.loss)]
        return [_as_term(name, one) for name, one in self.loss.items()]

    def to_per_example(self) -> PerExample | SumOfTerms:
        """The loss that a step minimizes, as a function of the model's whole output."""
        terms = [replace(term, loss=as_per_example(term.loss)) for term in self._terms]
        terms = [replace(term, loss=seen_through(term.loss, self.output, self.target)) for term in terms]
        if len(terms) == 1 and terms[0].factor == 1.0 and terms[0].trains is None:
            return terms[0].loss
        global_term = next((term.name for term in terms if sees_whole_batch(term.loss)), None)
        if global_term is not None:
            raise ConfigError(
                f"the term {global_term!r} is a loss over the global batch, which must be the only term, "
                "without a factor or `trains`. HINT: scale it and add other losses inside its function, "
                "fn(output, target, weight)."
            )
        return SumOfTerms(tuple(terms))

    def to_metrics(self, given: Metrics) -> Metrics:
        """The metrics of a run: the loss, accuracy, each of several terms, the task's own, those `given`."""
        terms = {} if len(self._terms) == 1 else {t.name: as_per_example(t.loss) for t in self._terms}
        own = {**terms, **self.metrics, **given.own}
        return Metrics(
            {name: seen_through(metric, self.output, self.target) for name, metric in own.items()},
            better={**dict.fromkeys(terms, "min"), **self.better, **given.own_better},
            ignore_index=given.ignore_index,
            labels=lambda o, t: given.labels(picked(o, self.output), picked(t, self.target)),
            means=num_means(self.to_per_example()),
        )

    def with_metrics(self, metrics: Mapping[str, Metric], better: Mapping[str, str] | None = None) -> "Task":
        """The same task with additional metrics."""
        return replace(self, metrics={**self.metrics, **metrics}, better={**self.better, **(better or {})})

    # ---- tasks by name -----------------------------------------------------------------------------------

    @staticmethod
    def classification(
        *,
        weight: Any = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        output: Pick = None,
        target: Pick = None,
    ) -> "Task":
        """Classification: cross entropy of logits (B, ..., C), and accuracy."""
        return Task(CrossEntropyLoss(weight, ignore_index, label_smoothing), output, target)

    @staticmethod
    def regression(*, output: Pick = None, target: Pick = None) -> "Task":
        """Regression: the mean squared error, and the mean absolute error as `mae`."""
        return Task(MSELoss(), output, target, {"mae": L1Loss().per_example}, {"mae": "min"})

    @staticmethod
    def language(*, ignore_index: int | None = None, output: Pick = None, target: Pick = None) -> "Task":
        """Next-token prediction: cross entropy of logits (B, T, C), and accuracy.

        ignore_index: the label of padding; the mean is over all other tokens of the global batch.
        """
        return Task.classification(ignore_index=ignore_index, output=output, target=target)

    @staticmethod
    def vae(
        beta: float = 1.0,
        *,
        output: Pick = None,
        target: Pick = None,
        reconstruction: str = "bce",
    ) -> "Task":
        """Reconstruction plus `beta` times divergence in nats per sample, for outputs (logits, mean, logvar).

        reconstruction: "bce" of logits against values in [0, 1], or "mse" (half the squared
        error). The target is the input: fit(X, X). Both terms are measured.
        Source: Kingma and Welling 2013, arXiv:1312.6114.
        """
        rebuilt = {"bce": bernoulli_error, "mse": _half_square}[reconstruction]
        return Task({"reconstruction": rebuilt, "divergence": (divergence, beta)}, output, target)

    @staticmethod
    def contrastive(temperature: float = 0.1, *, output: Pick = None) -> "Task":
        """Two embeddings per sample, compared over the global batch by `cx.ContrastiveLoss`."""
        return Task(ContrastiveLoss(temperature), output)

    @staticmethod
    def distillation(temperature: float = 2.0, alpha: float = 0.5, *, output: Pick = None) -> "Task":
        """A student learns from labels and a teacher's logits; target: the pair (labels, teacher_logits).

        Compute the teacher's logits once with `predict`: fit(X, (y, teacher.predict(X))). The loss is
        alpha * T^2 * KL(teacher / T || student / T) + (1 - alpha) * cross entropy; both are measured.
        Source: Hinton et al. 2015, arXiv:1503.02531.
        """
        hard = seen_through(CrossEntropyLoss().per_example, None, 0)
        hits = seen_through(accuracy, None, 0)
        soft = partial(_soft, temperature)
        return Task({"hard": (hard, 1 - alpha), "soft": (soft, alpha)}, output, None, {"accuracy": hits})


def _as_term(name: str, given: Any) -> Term:
    term = given if isinstance(given, Term) else Term(*given) if isinstance(given, tuple) else Term(given)
    return replace(term, name=name)


def seen_through(measure: Any, output: Pick, target: Pick) -> Any:
    """A loss or metric that takes whole trees, from `measure`, which takes the selected parts."""
    if output is None and target is None:
        return measure
    if isinstance(measure, UserLoss):
        return UserLoss(seen_through(measure.fn, output, target))
    if isinstance(measure, GlobalLoss):
        look = lambda o, t: measure.look(picked(o, output), picked(t, target))  # noqa: E731
        return GlobalLoss(measure.fn, measure.by_row, look)
    if isinstance(measure, Statistic):
        inner = measure.update
        return measure._replace(update=lambda s, o, t, w: inner(s, picked(o, output), picked(t, target), w))
    return Seen(measure, output, target)


@dataclass(frozen=True, eq=False)
class Seen:
    """A loss or a metric that sees a part of the model's output and of the target."""

    measure: Callable[[PyTree, PyTree], Any]
    output: Pick
    target: Pick

    def __call__(self, output: PyTree, target: PyTree) -> Any:
        return self.measure(picked(output, self.output), picked(target, self.target))


def takes_labels(loss: Any) -> bool:
    """Whether `loss` or one of its terms is a cyxjax classification loss, whose integer targets are labels.

    Under a user's own loss, integers may be counts, ranks, actions or padding.
    """
    if isinstance(loss, Seen):
        return takes_labels(loss.measure)
    ours = isinstance(getattr(loss, "__self__", None), CrossEntropyLoss | NLLLoss)
    return ours or any(takes_labels(term.loss) for term in getattr(loss, "terms", ()))


def picked(tree: PyTree, pick: Pick) -> PyTree:
    """The part of `tree` that `pick` selects."""
    if pick is None:
        return tree
    if callable(pick):
        return pick(tree)
    return getattr(tree, pick) if isinstance(pick, str) and hasattr(tree, "_fields") else tree[pick]


def _half_square(output: PyTree, target: jax.Array) -> jax.Array:
    made, wanted = flat_rows(output[0]), flat_rows(target)
    return 0.5 * jnp.square(made - wanted).sum(1)


def bernoulli_error(output: PyTree, target: jax.Array) -> jax.Array:
    """-log p(target) of each sample, in nats; output: (logits, mean, logvar), as below."""
    return optax.sigmoid_binary_cross_entropy(flat_rows(output[0]), flat_rows(target)).sum(1)


def divergence(output: PyTree, target: PyTree) -> jax.Array:
    """KL(N(mean, e^logvar) || N(0, 1)) of each sample."""
    mean, logvar = map(flat_rows, output[1:3])
    return -0.5 * (1 + logvar - jnp.square(mean) - jnp.exp(logvar)).sum(1)


def _soft(temperature: float, output: jax.Array, target: PyTree) -> jax.Array:
    student, teacher = (jax.nn.log_softmax(a.astype(jnp.float32) / temperature) for a in (output, target[1]))
    return mean_of_each(temperature**2 * (jnp.exp(teacher) * (teacher - student)).sum(-1))
