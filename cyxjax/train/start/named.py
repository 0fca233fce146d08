"""Builds the parts that sections of an experiment name: model, loss, metrics, callbacks. Errors name the key,
of model and optimizer within their section."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import optax

from cyxjax.config.sections import DataConfig, ModelConfig, OptimizerConfig
from cyxjax.core.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    Loss,
    MSELoss,
    NLLLoss,
    as_per_example,
)
from cyxjax.core.metrics import Metrics
from cyxjax.core.model.augment import Augment, as_augment
from cyxjax.core.objective.scores import (
    AUC,
    F1,
    R2,
    BitsPerCharacter,
    ConfusionMatrix,
    Perplexity,
    per_class,
    top_k,
)
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError
from cyxjax.models.registry import get_model
from cyxjax.plugins import called, checked_options, extra, named
from cyxjax.train.hooks.callbacks import EMA, BestCheckpoint, EarlyStopping, ReduceLROnPlateau
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.start.optimizer_groups import wants_optimizer, with_groups
from cyxjax.train.start.optimizers import build_optimizer

LOSSES: dict[str, Loss | None] = {
    "cross_entropy": CrossEntropyLoss(),
    "mse": MSELoss(),
    "l1": L1Loss(),
    "huber": HuberLoss(),
    "bce_with_logits": BCEWithLogitsLoss(),
    "nll": NLLLoss(),
    "model": None,
}
CALLBACKS = {kind.__name__: kind for kind in (EMA, BestCheckpoint, EarlyStopping, ReduceLROnPlateau)}
METRICS: dict[str, Callable] = {
    "auc": AUC,
    "bits_per_character": BitsPerCharacter,
    "confusion_matrix": ConfusionMatrix,
    "f1": F1,
    "per_class": per_class,
    "perplexity": Perplexity,
    "r2": R2,
    "top_k": top_k,
}
PIX = {  # functions of dm-pix that keep an image's shape
    *("random_brightness", "random_contrast", "random_flip_left_right", "random_flip_up_down"),
    *("random_gamma", "random_hue", "random_saturation"),
}
_BY_TASK = {"classification": "cross_entropy", "language": "cross_entropy", "regression": "mse"}
_OWN_LOSS = ("vae",)
_WIDTH = {"num_classes": "num_classes", "vocab_size": "num_classes"}
"""model option -> the fact of the dataset that sets it, unless the configuration does"""


def augment_of(section: DataConfig) -> Augment | None:
    """The augmentation of training samples; None for none.

    The functions are looked up when they are first called, so they need not be installed to predict.
    """
    return as_augment([_augment(one, f"data.augment.{n}") for n, one in enumerate(section.augment)])


def _augment(one: Mapping[str, Any], key: str) -> Augment:
    name, options = one["name"], one["options"]

    @cache
    def found() -> Callable:
        made = getattr(extra("dm_pix", "cyxjax[pix]"), name) if name in PIX else None
        made = made or named("augmentation", name, dict.fromkeys(PIX), key=key)
        return _with_options(f"augmentation {name!r}", made, options, key)

    return lambda sample_key, x: found()(sample_key, x)


def model_of(section: ModelConfig, info: DatasetInfo, seed: int) -> Any:
    """The untrained model, with the widths that the data need. Raises: ConfigError."""
    builder = get_model(section.name)
    known = builder.options()
    implied = {option: getattr(info, fact) for option, fact in _WIDTH.items() if option in known}
    if "rngs" in known:  # a flax.nnx module draws its parameters when it is created
        from flax import nnx

        implied["rngs"] = nnx.Rngs(seed)
    return builder(**(implied | section.options))


def loss_named(name: str) -> Any:
    """The loss of this name in a configuration file; None for "model". Raises: ConfigError."""
    return named("loss", name, LOSSES, unknown=f"loss={name!r} is not known.", key="loss")


def optimizer_named(name: str) -> optax.GradientTransformation:
    """The optimizer of this name in a configuration file, with its default rate. Raises: ConfigError."""
    section = OptimizerConfig()
    section.name = name  # checked, as in a file
    return build_optimizer(section)


def loss_of(given: str | dict[str, Any], model: str, info: DatasetInfo) -> Any:
    """The loss; None if the model, of this name, computes it. Raises: ConfigError."""
    name, options = (given, {}) if isinstance(given, str) else (given["name"], given["options"])
    if name == "auto" and model not in _OWN_LOSS and info.task not in _BY_TASK:
        raise ConfigError(
            f"no loss is known for the task {info.task!r} of the dataset. HINT: name one, for example "
            "--loss mse.",
            key="loss",
        )
    if name == "auto":
        name = "model" if model in _OWN_LOSS else _BY_TASK[info.task]
    found = loss_named(name)
    if options and name in LOSSES:
        found = type(found) if found else lambda: None  # a loss that the model computes has no options
    if isinstance(found, type):
        return called(f"loss {name!r}", found, options, "loss")
    return _with_options(f"loss {name!r}", found, options, "loss")


def optimizer_of(section: OptimizerConfig, loss: Any) -> optax.GradientTransformation | None:
    """The optimizer; None if each term of the loss has its own and the section sets nothing. Raises:
    ConfigError."""
    if not wants_optimizer(as_per_example(loss)) and section == OptimizerConfig():
        return None
    made = build_optimizer(section)
    return with_groups(made, section.groups) if section.groups else made


def metrics_of(section: Sequence[Mapping[str, Any]], info: DatasetInfo, loss: Any = None) -> Metrics:
    """The metrics of every task and those that `section` names: ours, functions (output, target) -> one value
    per sample, and statistics.

    Ours leave out the label that `loss` ignores. A function's attribute `better`, "min" or "max", says which
    values are better. Raises: ConfigError.
    """
    made: dict[str, Callable] = {}
    better: dict[str, str] = {}
    names = info.class_names or tuple(map(str, range(info.num_classes)))
    ignored = getattr(loss, "ignore_index", None)
    facts = {"names": names, "num_classes": info.num_classes, "ignore_index": ignored}
    for number, one in enumerate(section):
        name, options, key = one["name"], one["options"], f"metrics.{number}"
        if name == "accuracy" and not options:
            continue  # of every task
        found = named("metric", name, METRICS, key=key)
        short = name.rpartition(":")[2].rpartition(".")[2]
        if name in METRICS:
            known = inspect.signature(found).parameters
            implied = {option: fact for option, fact in facts.items() if option in known}
            own = called(f"metric {name!r}", found, implied | options, key)
            own = own if name == "per_class" else {short: own}
        else:
            own = {short: _with_options(f"metric {name!r}", found, options, key)}
            if isinstance(getattr(found, "better", None), str):
                better[short] = found.better
        if made.keys() & own.keys():
            raise ConfigError(
                f"metrics: two are called {short!r}. HINT: write one as a function with a name of its own.",
                key=key,
            )
        made |= own
    return Metrics(made, better=better)


def callbacks_of(section: Sequence[Mapping[str, Any]]) -> list[Hook]:
    """The hooks named, in their order. Raises: ConfigError."""
    return [_callback(one, f"callbacks.{number}") for number, one in enumerate(section)]


def _callback(one: Mapping[str, Any], key: str) -> Hook:
    """The result of a class or function called with its options; a hook object unchanged."""
    found = named("callback", one["name"], CALLBACKS, key=key)
    if isinstance(found, Hook) and not one["options"]:
        return found
    return called(f"callback {one['name']!r}", found, one["options"], key)


def _with_options(what: str, found: Any, options: Mapping[str, Any], key: str) -> Any:
    """`found` with `options` bound as keywords. Raises: ConfigError for an option it does not take."""
    return partial(found, **checked_options(what, found, options, key)) if options else found
