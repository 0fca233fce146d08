"""Whether what a loss takes for log-probabilities are some: raw scores would be made larger without end."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from cyxjax.core.losses import NLLLoss, UserLoss
from cyxjax.core.objective.task import Seen, picked
from cyxjax.errors import DataError

PyTree = Any
_OF_OPTAX = ("kl_divergence", "kl_divergence_with_log_targets")
_WIDE = 0.05  # of a logarithm; half precision rounds by less


def takes_log_probabilities(loss: Any) -> bool:
    """Whether `loss`, or a term of it, is a cx.NLLLoss, or a KL divergence of optax."""
    return next(_parts(loss, None), None) is not None


def refuse_scores(loss: Any, output: PyTree) -> None:
    """Returns for an output whose exponentials sum to 1 over the classes, wherever such a loss looks at it.

    output: the model's for some samples, host arrays. Raises: DataError with the sum that was found.
    """
    for name, look in _parts(loss, None):
        scores = np.asarray(look(output), np.float64)
        total = np.asarray(jax.nn.logsumexp(scores, axis=-1))
        if not (np.abs(total) < _WIDE).all():
            worst = float(np.exp(np.clip(total.ravel()[np.abs(total).argmax()], -50, 50)))
            raise DataError(
                f"{name} takes log-probabilities, whose exponentials sum to 1; those of the output sum "
                f"to {worst:.3g}. HINT: cx.CrossEntropyLoss() takes raw outputs; or end the model with "
                "jax.nn.log_softmax (cx.LogSoftmaxModule)."
            )


def _parts(loss: Any, above: Any) -> Iterator[tuple[str, Any]]:
    """(name, output -> what of it that one is given) of each in `loss` that takes log-probabilities."""
    look = above or (lambda output: output)
    given: Any = loss.fn if isinstance(loss, UserLoss) else None
    if isinstance(getattr(loss, "__self__", None), NLLLoss):
        yield "NLLLoss", look
    elif getattr(given, "__name__", "") in _OF_OPTAX and given.__module__.partition(".")[0] == "optax":
        yield given.__name__, look
    elif isinstance(loss, Seen):
        yield from _parts(loss.measure, lambda output: picked(look(output), loss.output))
    for term in getattr(loss, "terms", ()):
        yield from _parts(term.loss, look)
