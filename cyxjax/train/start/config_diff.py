"""What changed since the checkpoint a run goes on from: configuration, data and code, a line for each."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cyxjax.config.compared import effect_of
from cyxjax.config.effects import NO_NUMBERS
from cyxjax.data.content import find_difference
from cyxjax.errors import ConfigError
from cyxjax.launch.program import code_facts, own_modules
from cyxjax.train.hooks.callbacks import in_the_step
from cyxjax.train.program import Recipe
from cyxjax.train.rates.optimizer import for_trainer

META = "same_run"
_LONGEST = 80


def refuse_other_strategy(loaded: str, now: str) -> None:
    """Raises: ConfigError where a fit asks for another strategy than the state that was loaded is kept by."""
    if loaded != now:
        raise ConfigError(
            f"load_checkpoint gave a state as comm={loaded!r} keeps it, this fit has comm={now!r}. HINT: "
            f"comm={loaded!r}, or fit a new trainer with checkpoint_dir=<that folder>, resume='auto': it "
            "takes a checkpoint under any strategy.",
            key="comm",
        )


def told(config: Mapping[str, Any], recipe: Recipe, augment: str = "") -> dict[str, Any]:
    """The configuration, which of an experiment says all, with what is known of a program's optimizer, of its
    callbacks that take part in the step, and of its augmentation (`augment`, where known).
    """
    if "optimizer" in config:
        return dict(config)
    optimizer = for_trainer(recipe.optimizer)  # at the rate that was set
    made = {"lr": getattr(optimizer, "lr", None), **getattr(optimizer, "made_with", {})}
    about = {name: value for name, value in made.items() if _is_plain(value)}
    inside = ", ".join(type(one).__name__ for one in in_the_step(recipe.callbacks))
    known = {"optimizer": about, "augment": augment, "callbacks": inside or "none"}
    return {**config, **{name: value for name, value in known.items() if value}}


def _is_plain(value: Any) -> bool:
    """Whether JSON has it: a number, a text, or several."""
    return all(isinstance(one, int | float | str) for one in (value if isinstance(value, tuple) else [value]))


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each key of which `now` has another value than `then`.

    A key that `then` lacks is of a later version and not compared, unless it is an option, which one gives.
    An empty `then` is of no run that this one goes on from, and nothing is compared.
    """
    if not then:
        return []
    return [
        f"WARNING: the configuration changed since the checkpoint: {key} was {was}, is {now_is}."
        for key, was, now_is in other_values(then, now, later=True)
        if key != "reproducibility"  # told by `exact.changed_mode`
    ]


def other_values(
    then: Mapping[str, Any], now: Mapping[str, Any], *, later: bool = False
) -> list[tuple[str, str, str]]:
    """(key, value of `then`, value of `now`) of the keys that make other numbers.

    later: `now` may be of a later version, whose keys `then` lacks.
    """
    before, after = _flat(then), _flat(now)
    decays = after.get("schedule.name") in ("cosine", "linear") and after.get("schedule.decay_steps") is None
    skipped = NO_NUMBERS if decays else NO_NUMBERS | {"length"}
    found = []
    for key in dict.fromkeys([*after, *before]):
        compared = key in before or "options." in key or not later or _knows(then, key)
        if key == "augment" and not _comparable(before.get(key, ""), after.get(key, "")):
            continue
        if compared and effect_of(key) not in skipped and before.get(key) != after.get(key):
            found.append((key, _said(before, key), _said(after, key)))
    return found


def _comparable(was: str, now: str) -> bool:
    """Whether both augmentations are known, and their programs as one version of jax writes them."""
    versions = {text.rpartition("(jax ")[2] for text in (was, now) if text != "none"}
    return bool(was and now) and len(versions) < 2


def _knows(tree: Any, key: str) -> bool:
    """Whether the dotted `key` was there to be set, also where it, or the section it is in, was None."""
    for part in key.split("."):
        if not isinstance(tree, Mapping):
            return True
        if part not in tree:
            return False
        tree = tree[part]
    return True


def refuse_other_epochs(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """An epoch is so many steps of a stream, or a pass: its place is counted in them.

    Raises: ConfigError where a run would go on with epochs of another length.
    """
    before, after = then.get("steps_per_epoch"), now.get("steps_per_epoch")
    if then and before != after:
        raise ConfigError(
            f"steps_per_epoch was {before} in the run this one goes on from, and is {after}: its place "
            "in the stream is counted in such epochs. HINT: set it as before, or resume: never.",
            key="steps_per_epoch",
        )


def _said(values: Mapping[str, Any], key: str) -> str:
    text = repr(values[key]) if key in values else "not given"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    """Values by dotted key, without those that say nothing."""
    if not isinstance(tree, Mapping):
        return (
            {} if tree is None or tree in ((), []) else {key: list(tree) if isinstance(tree, tuple) else tree}
        )
    return {
        name: value
        for part, inner in tree.items()
        for name, value in _flat(inner, f"{key}.{part}" if key else str(part)).items()
    }


def sums_of(meta: Mapping[str, Any], stored: np.ndarray, names: tuple[str, ...], num_rows: int) -> np.ndarray:
    """The sums of the epoch under way; zeros where they are of other metrics than are measured now."""
    same = tuple(meta.get("metrics", names)) == names and stored.shape == (num_rows, 2)
    return stored if same else np.zeros((num_rows, 2))


def own_code() -> dict[str, str]:
    """A digest of each of the user's own modules, as they are when a fit begins."""
    return {name: digest for name, (digest, _) in own_modules().items()}


def to_meta(data: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps of code and data, for `changes`; own: as `own_code` said."""
    return {META: {"code": code_facts(), "data": data, "own": own}}


def changes(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """A line each for the data and the code that a resumed run has changed since `meta` was written."""
    return _read(meta, lambda kept: [*_other_data(kept, data), *_other_code(kept)])


def other_samples(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """A clause for training data that differ, by a bit or more, from those `meta` was written with."""
    train = {name: found for name, found in data.items() if name == "training data"}
    return _read(
        meta,
        lambda kept: [
            f"{what} of the {name} was {before}, is {after}"
            for name, what, before, after in _differing(kept, train)
        ],
    )


def changed_files(meta: Mapping[str, Any]) -> list[str]:
    """A line for the user's own files that are others than those that `meta` was written with."""
    return _read(meta, _told_of_files)


def changed_data(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """A line for each of the data, as they are read, that are others than those `meta` was written with."""
    hint = "HINT: name the data of then (`data.root`), or train on these."

    return _read(meta, lambda kept: [f"{line} {hint}" for line in _other_data(kept, data)])


def _read(meta: Mapping[str, Any], compare: Callable[[Mapping[str, Any]], list[str]]) -> list[str]:
    """What `compare` finds; nothing where this was not kept, by a version before, or another program."""
    if META not in meta:
        return []
    try:
        return compare(meta[META])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ["WARNING: what the checkpoint says of its data and code cannot be read: not compared."]


def _other_data(kept: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    for name, what, before, after in _differing(kept, data):
        yield f"WARNING: the {name} changed since the checkpoint: {what}: {before} then, {after} now."


def _differing(kept: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(name, what differs, then, now) of the data that changed."""
    for name, now in data.items():
        then = kept["data"].get(name)
        if then is not None and (found := find_difference(then, now)):
            yield name, *found


def _other_code(kept: Mapping[str, Any]) -> list[str]:
    now = code_facts()
    other = [name for name, digest in now.items() if kept["code"].get(name, digest) != digest]
    program = now.get("the program", "").split(" ")[0]  # named already
    other += [path for path in _other_files(kept) if Path(path).name != program]
    return [f"WARNING: changed since the checkpoint: {', '.join(other)}."] if other else []


def _other_files(kept: Mapping[str, Any]) -> list[str]:
    then = kept.get("own", {})
    return [path for name, (digest, path) in own_modules().items() if then.get(name, digest) != digest]


def _told_of_files(kept: Mapping[str, Any]) -> list[str]:
    files = _other_files(kept)
    if not files:
        return []
    return [
        f"WARNING: {', '.join(files)} changed since the checkpoint was written: what is loaded computes as "
        "the code says now. HINT: go back to the code of then, or train again."
    ]
