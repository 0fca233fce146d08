"""Whether a loss of the user's is called as a step calls it: with the model's output and the target."""

import inspect
from typing import Any

from cyxjax.core.losses import UserLoss
from cyxjax.errors import ConfigError

_RUNS_THE_MODEL = ("model", "params", "variables", "state", "apply_fn")
# Words that mean one thing alone; `y` is a target only beside a word for outputs.
_TARGETS = frozenset(("y_true", "true", "truth", "target", "targets", "label", "labels", "y"))
_OUTPUTS = frozenset(
    ("y_pred", "y_hat", "yhat", "output", "outputs", "logit", "logits")
    + ("pred", "preds", "predicted", "prediction", "predictions")
)


def refuse_other_arguments(loss: Any) -> None:
    """Returns for a loss, or terms, of (output, target); one whose arguments cannot be known is left alone.

    Raises: ConfigError for one that runs the model, as the `loss_fn` of Flax's tutorials, takes more, or
    whose names say that it takes the target first, as Keras's do: it would train, and to wrong numbers.
    """
    for term in getattr(loss, "terms", ()):
        refuse_other_arguments(term.loss)
    if not isinstance(loss, UserLoss):
        return
    try:
        takes = inspect.signature(loss.fn)
    except (TypeError, ValueError):
        return
    names = list(takes.parameters)
    try:
        takes.bind(None, None)
        fits = not names or names[0] not in _RUNS_THE_MODEL
    except TypeError:
        fits = False
    if not fits:
        runs = names and names[0] in _RUNS_THE_MODEL
        raise ConfigError(
            f"the loss takes ({', '.join(names)}), a step calls it with (output, target). HINT: "
            + ("leave the model's call out, the trainer makes it: " if runs else "")
            + "lambda output, target: optax.softmax_cross_entropy_with_integer_labels(output, target)."
        )
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first, second = ([n for n in names if takes.parameters[n].kind in by_place] + ["", ""])[:2]
    if first.lower() in _TARGETS and second.lower() in _OUTPUTS:
        raise ConfigError(
            f"the loss takes ({first}, {second}), a step calls it with (output, target). HINT: "
            "lambda output, target: loss(target, output)."
        )
