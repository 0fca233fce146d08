"""The keywords of `fit`: those of its configuration, and the ways other libraries pass data and rates."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.errors import ConfigError, nearest

_OF_A_RUN_FOLDER = {"run_dir", "sinks", "report", "wandb", "profile"}
_GO_ELSEWHERE = {  # keywords of other libraries' fit -> what to write here
    **dict.fromkeys(
        ("model", "loss_fn", "optimizer", "metrics", "callbacks", "augment"),
        "pass it to cx.DistributedTrainer.",
    ),
    "sample_weight": "put the weights into the targets, and return (values, weights) from the loss.",
    "class_weight": "use cx.CrossEntropyLoss(weight=[...]).",
}


def parse(
    data: tuple[Any, ...],
    config: DistributedTrainingConfig | None,
    validation_data: Any,
    settings: dict[str, Any],
    known: Iterable[str],
) -> tuple[tuple[Any, ...], DistributedTrainingConfig | None]:
    """(data, configuration) of `fit(*data, config=..., validation_data=..., **settings)`.

    `settings` are keys of the configuration; they replace those of `config`, which stays as it is. With
    run_dir or another key of a run folder it becomes a `TrainConfig`.
    known: the other keywords of `fit`. Raises: ConfigError for a keyword that is neither, and for a
    run folder that cannot be one.
    """
    given = list(data)
    if given and isinstance(given[-1], DistributedTrainingConfig):
        config = given.pop()
    if len(given) == 1 and isinstance(given[0], Mapping) and "train" in given[0]:
        raise ConfigError(
            f"fit got a {type(given[0]).__name__} of parts of the data: {', '.join(map(str, given[0]))}. "
            "HINT: fit(data['train'], data['val']) of datasets or loaders, fit(X, y) of arrays."
        )
    keys = {*DistributedTrainingConfig.model_fields, *_OF_A_RUN_FOLDER}
    for word in settings:
        if word not in keys:
            hint = _GO_ELSEWHERE.get(word) or nearest(word, {*known, *keys})
            raise ConfigError(f"fit has no argument {word}. HINT: {hint}", key=word)
    if settings:
        before = {} if config is None else {one: getattr(config, one) for one in config.model_fields_set}
        kind = DistributedTrainingConfig if config is None else type(config)
        kind = TrainConfig if settings.keys() & _OF_A_RUN_FOLDER else kind
        config = kind(**(before | settings))
    if validation_data is not None:
        is_pair = isinstance(validation_data, tuple | list) and len(given) == len(validation_data) == 2
        given += list(validation_data) if is_pair else [validation_data]
    if isinstance(config, TrainConfig):
        config.run_folder.refuse_unusable()
    return tuple(given), config


class RatesAsFactor(NamedTuple):
    """A schedule of learning rates as factors on the optimizer's rate."""

    rates: Callable[[Any], Any]
    lr: float

    def __call__(self, step: Any) -> Any:
        return self.rates(step) / self.lr


def schedule_of(schedule: Any, lr_schedule: Any, lr: Any) -> Any:
    """The factor on the learning rate `lr`: `schedule` gives factors, `lr_schedule` gives rates.

    Raises: ConfigError where both are given, or the optimizer's own rate is not one number above 0.
    """
    if lr_schedule is None:
        return schedule
    if schedule is not None:
        raise ConfigError(
            "fit got schedule and lr_schedule. HINT: pass one: lr_schedule gives learning rates, schedule "
            "factors on the optimizer's.",
            key="lr_schedule",
        )
    if not callable(lr_schedule) or not isinstance(lr, int | float) or not lr > 0:
        raise ConfigError(
            f"lr_schedule needs a function of the step and an optimizer whose rate is a number, got {lr!r}. "
            "HINT: cx.AdamOptimizer(0.001), or give the schedule to the optimizer: optax.adam(schedule).",
            key="lr_schedule",
        )
    return RatesAsFactor(lr_schedule, float(lr))
