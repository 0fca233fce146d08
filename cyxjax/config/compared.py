"""What each key of an experiment affects, for all that compares configurations. See config/effects.py."""

from cyxjax.config.effects import Effect, effects_of
from cyxjax.config.experiment import TrainConfig

_EFFECTS = effects_of(TrainConfig)


def effect_of(key: str) -> Effect:
    """What the dotted `key` of a configuration affects; "numbers" for a key that is not known."""
    return _EFFECTS.get(key.partition(".")[0], "numbers")
