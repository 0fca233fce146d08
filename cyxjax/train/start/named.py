"""Builds what an experiment names: data, model, loss, metrics, callbacks. Errors name the key."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import optax

from cyxjax.config.errors import blamed
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.sections import OptimizerConfig
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
from cyxjax.core.objective.foreign_metrics import is_statistic
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
from cyxjax.data.catalog import Splits, load_dataset
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError
from cyxjax.models.config import Config
from cyxjax.models.registry import get_model
from cyxjax.plugins import checked_options, extra, named
from cyxjax.train.hooks.callbacks import EMA, BestCheckpoint, EarlyStopping, ReduceLROnPlateau
from cyxjax.train.hooks.hook import Hook
from cyxjax.train.start.groups import with_groups
from cyxjax.train.start.optimizer_groups import wants_optimizer
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
PIX = {  # of dm-pix, that keep an image's shape
    *("random_brightness", "random_contrast", "random_flip_left_right", "random_flip_up_down"),
    *("random_gamma", "random_hue", "random_saturation"),
}
_BY_TASK = {"classification": "cross_entropy", "language": "cross_entropy", "regression": "mse"}
_OWN_LOSS = ("vae",)
_WIDTH = {"num_classes": "num_classes", "vocab_size": "num_classes"}
"""model option -> what the data set says it should be, unless the configuration does"""


def data_of(config: TrainConfig) -> Splits:
    """Train, validation and test samples. Raises: ConfigError, DataError."""
    with blamed(config, "data"):
        return load_dataset(config.data.name, config.data.root, **config.data.options)


def augment_of(config: TrainConfig) -> Augment | None:
    """The augmentation of training samples; None for none.

    The functions are looked for as they are first called: who only predicts need not have them.
    """
    return as_augment([_augment(one, f"data.augment.{n}") for n, one in enumerate(config.data.augment)])


def _augment(one: Mapping[str, Any], key: str) -> Augment:
    name, options = one["name"], one["options"]

    @cache
    def found() -> Callable:
        made = getattr(extra("dm_pix", "cyxjax[pix]"), name) if name in PIX else None
        made = made or named("augmentation", name, dict.fromkeys(PIX), key=key)
        return partial(made, **_options("augmentation", name, made, options, key, "key, x"))

    return lambda sample_key, x: found()(sample_key, x)


def model_of(config: TrainConfig, info: DatasetInfo) -> Any:
    """The untrained model, as wide as the data need. Raises: ConfigError."""
    with blamed(config, "model"):
        builder = get_model(config.model.name)
        known = builder.options()
        implied = {option: getattr(info, fact) for option, fact in _WIDTH.items() if option in known}
        if "rngs" in known:  # a flax.nnx module draws its parameters as it is made
            from flax import nnx

            implied["rngs"] = nnx.Rngs(config.seed)
        return builder(Config(implied | config.model.options, source="model.options"))


def loss_named(name: str) -> Any:
    """The loss of this name in a configuration file; None for "model". Raises: ConfigError."""
    return named("loss", name, LOSSES, unknown=f"loss={name!r} is not known.", key="loss")


def optimizer_named(name: str) -> optax.GradientTransformation:
    """The optimizer of this name in a configuration file, with its usual rate. Raises: ConfigError."""
    asked: dict[str, Any] = {"optimizer": {"name": name}}
    return build_optimizer(TrainConfig(**asked).optimizer)


def loss_of(config: TrainConfig, info: DatasetInfo) -> Any:
    """The loss; None for that of the model. Raises: ConfigError."""
    given = config.loss
    name, options = (given, {}) if isinstance(given, str) else (given["name"], given["options"])
    if name == "auto":
        name = "model" if config.model.name in _OWN_LOSS else _BY_TASK[info.task]
    known = LOSSES | {"auto": None}
    found = named("loss", name, known, unknown=f"loss={name!r} is not known.", key="loss")
    if found is None and options:
        raise ConfigError(
            "loss: model uses the loss that the model returns and takes no options. HINT: set model.options.",
            key="loss",
        )
    kind = type(found) if name in LOSSES else found
    if isinstance(kind, type) and (options or kind is found):
        return _made("loss", name, {name: kind}, options, "loss")
    if not options:
        return found
    function = named("loss", name, LOSSES, key="loss")
    return partial(function, **_options("loss", name, function, options, "loss"))


def optimizer_of(config: TrainConfig, loss: Any) -> optax.GradientTransformation | None:
    """The optimizer; None where each term of the loss has its own, and the section says nothing. Raises:
    ConfigError."""
    if not wants_optimizer(as_per_example(loss)) and config.optimizer == OptimizerConfig():
        return None
    with blamed(config, "optimizer"):
        made = build_optimizer(config.optimizer)
    return with_groups(made, config.optimizer.groups) if config.optimizer.groups else made


def metrics_of(config: TrainConfig, info: DatasetInfo) -> Metrics:
    """The metrics of every task and those named: ours, functions (output, target) -> one value a sample,
    statistics and classes of other libraries.

    An attribute `better`, "min" or "max", says which values are. Raises: ConfigError.
    """
    made: dict[str, Callable] = {}
    better: dict[str, str] = {}
    for number, one in enumerate(config.metrics):
        made_of, options = one["name"], one["options"]
        key = f"metrics.{number}"
        short = made_of.rpartition(":")[2].rpartition(".")[2]
        if short in made:
            raise ConfigError(f"two metrics are named {short!r}. HINT: rename one.", key=key)
        if made_of == "per_class":
            named_so = info.class_names or tuple(map(str, range(info.num_classes)))
            made |= _made("metric", made_of, METRICS, {"names": named_so} | options, key)
            continue
        if made_of in METRICS:
            wide = {"num_classes": info.num_classes} if _wants_classes(METRICS[made_of]) else {}
            made[short] = _made("metric", made_of, METRICS, wide | options, key)
            continue
        found = named("metric", made_of, METRICS, key=key)
        if is_statistic(found):
            made[short] = partial(found, **options) if options else found
            continue
        function = named("metric", made_of, METRICS, key=key)
        made[short] = partial(function, **_options("metric", made_of, function, options, key))
        if hasattr(function, "better"):
            better[short] = function.better
    return Metrics(made, better=better)


def _wants_classes(kind: Callable) -> bool:
    return "num_classes" in inspect.signature(kind).parameters


def callbacks_of(config: TrainConfig) -> list[Hook]:
    """The hooks named, in their order. Raises: ConfigError."""
    return [
        _made("callback", one["name"], CALLBACKS, one["options"], f"callbacks.{number}")
        for number, one in enumerate(config.callbacks)
    ]


def _made(kind: str, name: str, ours: Mapping[str, Any], options: Mapping[str, Any], key: str) -> Any:
    """What `name` stands for, called with `options`; an instance of a hook as it is."""
    found = named(kind, name, ours, key=key)
    if not callable(found) or (isinstance(found, Hook) and not options):
        return found
    try:
        return found(**checked_options(f"{kind} {name!r}", found, options, "options"))
    except ConfigError as err:
        raise ConfigError(str(err), key=key) from err
    except (TypeError, ValueError) as err:
        raise ConfigError(
            f"{kind} {name!r} cannot be made with options {dict(options)}: {type(err).__name__}: {err} "
            "HINT: options are the keywords of its call.",
            key=key,
        ) from err


def _options(
    kind: str,
    name: str,
    function: Callable,
    options: Mapping[str, Any],
    key: str,
    given: str = "output, target",
) -> dict[str, Any]:
    """`options`, which `function` takes beside the two that it is `given`."""

    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as err:
        raise ConfigError(
            f"{kind} {name!r} cannot be called as ({given}) with options {dict(options)}: {err}. "
            "HINT: options are its further keywords.",
            key=key,
        ) from err
    return dict(options)
