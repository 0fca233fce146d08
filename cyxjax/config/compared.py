"""Compares two configurations: which keys change the numbers. config/effects.py says what a key affects."""

from collections.abc import Mapping
from typing import Any

from cyxjax.config.command_line import names
from cyxjax.config.effects import NO_NUMBERS, Effect, effects_of
from cyxjax.config.experiment import TrainConfig
from cyxjax.files import dotted

_EFFECTS = effects_of(TrainConfig)
_NAMED_OTHERWISE = ("callbacks", "optimizer.name")  # in a program and in a configuration file
_LONGEST = 80  # characters of a value that are shown


def effect_of(key: str) -> Effect:
    """What the dotted `key` of a configuration affects; "numbers" for a key that is not known."""
    return _EFFECTS.get(key.partition(".")[0], "numbers")


def differing_values(
    then: Mapping[str, Any], now: Mapping[str, Any], *, later: bool = False
) -> list[tuple[str, str, str]]:
    """(key, value of `then`, value of `now`) of the keys that change the numbers.

    later: `now` may be of a later version, with keys that `then` lacks. If only one of them names a model,
    the other came from a program, which has fewer keys, and other names for optimizer and callbacks: the keys
    that both have are compared, except these.
    """
    before, after = _flat(then), _flat(now)
    both = ("model" in then) == ("model" in now)
    decays = after.get("schedule.name") in ("cosine", "linear") and after.get("schedule.decay_steps") is None
    skipped = NO_NUMBERS if decays else NO_NUMBERS | {"length"}
    known, given = dict(dotted(then)), dict(dotted(now))  # also None, and sections that are None or empty
    found = []
    for key in dict.fromkeys([*after, *before]):
        compared = key in before or "options." in key or not later or names(known, key)
        if key == "augment" and not _comparable(before.get(key, ""), after.get(key, "")):
            continue
        compared &= both or (names(known, key) and names(given, key) and key not in _NAMED_OTHERWISE)
        if compared and effect_of(key) not in skipped and before.get(key) != after.get(key):
            found.append((key, _shown(before, key), _shown(after, key)))
    return found


def _comparable(was: str, now: str) -> bool:
    """Whether both augmentations are known, and their programs were written by the same version of jax."""
    versions = {text.rpartition("(jax ")[2] for text in (was, now) if text != "none"}
    return bool(was and now) and len(versions) < 2


def _shown(values: Mapping[str, Any], key: str) -> str:
    text = repr(values[key]) if key in values else "not given"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, without None and empty ones."""
    settings = ((key, list(value) if isinstance(value, tuple) else value) for key, value in dotted(tree))
    return {key: value for key, value in settings if value not in (None, [], {})}
