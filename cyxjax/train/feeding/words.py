"""What `fit` is given beside data: its configuration, fixed while it runs, and keywords that belong there."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.errors import ConfigError, nearest

P = ParamSpec("P")
R = TypeVar("R")


def settings_apart(call: Callable[P, R]) -> Callable[P, R]:
    """`call`, which says of a keyword that is not its own where it belongs, and while which no setting can be
    changed. Raises: ConfigError.
    """
    own = signature(call).parameters.keys() - {"self", "data"}

    @wraps(call)
    def checked(*args: P.args, **words: P.kwargs) -> R:
        for word, value in words.items():
            if word in own:
                continue
            name = call.__name__
            if word in DistributedTrainingConfig.model_fields:
                way = f"{name}(..., cx.distributed.DistributedTrainingConfig({word}={value!r}))."
            else:
                way = nearest(word, {*own, *DistributedTrainingConfig.model_fields})
            raise ConfigError(f"{name} takes no {word}={value!r} itself. HINT: {way}", key=word)
        with ExitStack() as held:
            for one in (*args, *words.values()):
                if isinstance(one, DistributedTrainingConfig):
                    held.enter_context(one.in_a_fit())
            return call(*args, **words)

    return checked
