"""Matches the names in a file with those of a model, by rules or by convention; reports every difference.

A rule is `{"encoder.*.weight": "Encoder_*/kernel"}`: `*` matches any text, and the stars of the target are
replaced by the matched texts in order; null leaves an array out. Without a rule, `a.b` becomes `a/b`, torch's
last word becomes Flax's (`weight` is kernel, scale or embedding; `running_mean` is mean), and wrappers
(`module.`) are removed.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cyxjax.errors import CheckpointError, ConfigError, nearest
from cyxjax.weights import Weights

_WRAPPERS = ("module/", "_orig_mod/", "state_dict/")
_LAST = {
    "weight": ("kernel", "scale", "embedding"),
    "running_mean": ("mean",),
    "running_var": ("var",),
    "gamma": ("scale",),
    "beta": ("bias",),
}
_TORCHS = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
_PREFIXES = ("model_state/batch_stats/", "model_state/", "params/", "")
_LOG = logging.getLogger(__name__)
_COUNTER = "num_batches_tracked"  # torch's; Flax's BatchNorm has none
_SHOWN = 12
Rule = tuple[str, re.Match[str], str | None]  # a pattern, what its stars matched, the name in the model


class Filled(NamedTuple):
    """The arrays that a file gives a model."""

    values: dict[str, np.ndarray]  # by the model's names, in its dtypes
    table: list[str]  # lines for the user: what matched and what did not


def fill(
    weights: Weights, targets: Mapping[str, Any], rules: Mapping[str, str | None], *, strict: bool
) -> Filled:
    """Arrays for `targets` (shapes and dtypes by name, `params/...` and `model_state/...`).

    strict: every target must be filled and every array used. Otherwise at least one target must be filled;
    the others keep their drawn values.
    A rule that leaves arrays out and matches none is a warning.
    Raises: ConfigError for another rule that matches nothing; CheckpointError naming arrays that are missing,
        unused, or of the wrong shape or kind.
    """
    sources, over = _matched(weights, targets, rules)
    wrong = [
        why for target, name in sources.items() if (why := _unlike(name, weights, target, targets[target]))
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} arrays do not fit: {'; '.join(wrong[:_SHOWN])}. HINT: change the model, or add a "
            "rule to init_from.map (null leaves an array out)."
        )
    missing = [name for name in targets if name not in sources]
    summary = _summary(weights, sources, missing, over)
    if not sources or (strict and (missing or over)):
        raise CheckpointError(
            f"{'; '.join(summary)}. HINT: map names in init_from.map, or set strict: false to accept this."
        )
    have = {target: weights.arrays[name] for target, name in sources.items()}
    values = {
        target: _turned(name, target, have[target].read()).astype(targets[target].dtype)
        for target, name in sources.items()
    }
    matches = [
        f"{target.removeprefix('params/')} <- {name} {have[target].dtype.name}{list(have[target].shape)}"
        for target, name in list(sources.items())[:_SHOWN]
    ]
    return Filled(values, [f"init_from: {summary[0]}", *(f"  {line}" for line in matches + summary[1:])])


def exported(arrays: Mapping[str, np.ndarray], rules: Mapping[str, str | None]) -> dict[str, np.ndarray]:
    """The model's `arrays` with names and layouts that `fill` reads back by the same rules, without null.

    A rule that matches is reversed; other names become torch's, or are kept where torch's are ambiguous.
    Rules of null do not count: what they left out of the file has values here.
    Raises: ConfigError if no name maps back to an array.
    """
    renamed = {pattern: put for pattern, put in rules.items() if put}

    def read_as(name: str) -> str | None:
        with suppress(ConfigError):  # a rule that maps it to no array of the model
            return _target(name, _rule(renamed, name), arrays)
        return None

    names: dict[str, str] = {}
    for target in arrays:
        for name in _names_for(target, renamed):
            if name not in names and read_as(name) == target:
                names[name] = target
                break
        else:
            raise ConfigError(f"no name maps to {target}. HINT: use fewer stars.", key="init_from.map")
    return {name: _turned(name, target, arrays[target], back=True) for name, target in names.items()}


def _names_for(target: str, rules: Mapping[str, str]) -> Iterator[str]:
    shorts = [target.removeprefix(prefix) for prefix in _PREFIXES if target.startswith(prefix)]
    for pattern, put in rules.items():
        if put.count("*") == pattern.count("*"):
            matches = (_regex(put).fullmatch(short) for short in shorts)
            yield from (_with_stars(pattern, match.groups()) for match in matches if match)
    above, slash, last = shorts[0].rpartition("/")
    yield f"{above}{slash}{_TORCHS.get(last, last)}".replace("/", ".")
    yield target


def _matched(
    weights: Weights, targets: Mapping[str, Any], rules: Mapping[str, str | None]
) -> tuple[dict[str, str], list[str]]:
    """({target: array name}, names of unused arrays that no rule left out)."""
    sources: dict[str, str] = {}
    used, over = set(), []
    # In a whole training state, only arrays under params/ count as unused.
    above = "params/" if any(name.startswith("params/") for name in weights.arrays) else ""
    for name in weights.arrays:
        rule = _rule(rules, name, name.removeprefix(above))
        target = _target(name, rule, targets)
        if rule is not None:
            used.add(rule[0])
        elif target is None and name.startswith(above) and not name.endswith(_COUNTER):
            over.append(name)
        if target is None:
            continue
        if target in sources:
            raise CheckpointError(
                f"{sources[target]} and {name} both map to {target}. HINT: add a rule to init_from.map."
            )
        sources[target] = name
    for pattern, put in rules.items():
        if pattern in used:
            continue
        text = f"{pattern!r} matches no array. HINT: {nearest(pattern, list(weights.arrays)[:200])[:300]}"
        if put:
            raise ConfigError(text, key="init_from.map")
        _LOG.warning("init_from.map: %s", text)  # a file of `cyxjax export` lacks what its run left out
    return sources, over


def _rule(rules: Mapping[str, str | None], *names: str) -> Rule | None:
    """The first of the `rules` that matches one of the `names` of an array in the file."""
    matches = ((p, _regex(p).fullmatch(name), put) for p, put in rules.items() for name in names)
    return next(((p, match, put) for p, match, put in matches if match), None)


def _target(name: str, rule: Rule | None, targets: Mapping[str, Any]) -> str | None:
    return _named(rule, targets) if rule else _guess(name, targets)


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _named(rule: Rule, targets: Mapping[str, Any]) -> str | None:
    """The name that a rule maps an array to; None if the rule leaves the array out."""
    pattern, match, put = rule
    if not put:
        return None
    name = _with_stars(put, match.groups())
    found = next((full for full in _full(name) if full in targets), None)
    if found is None:
        short = [target.removeprefix("params/") for target in targets]
        raise ConfigError(
            f"{pattern!r} maps to {name!r}, which is not in the model. HINT: {nearest(name, short)[:300]}",
            key="init_from.map",
        )
    return found


def _with_stars(pattern: str, texts: Sequence[str]) -> str:
    first, *rest = pattern.split("*")
    return first + "".join(text + after for text, after in zip(texts, rest, strict=False))


def _full(name: str) -> tuple[str, ...]:
    return name, f"params/{name}", f"model_state/{name}", f"model_state/batch_stats/{name}"


def _guess(name: str, targets: Mapping[str, Any]) -> str | None:
    plain = (name if "/" in name else name.replace(".", "/")).removesuffix("/value")
    while wrapped := next((one for one in _WRAPPERS if plain.startswith(one)), ""):
        plain = plain.removeprefix(wrapped)
    above, slash, last = plain.rpartition("/")
    names = [plain, *(f"{above}{slash}{other}" for other in _LAST.get(last, ()))]
    return next((full for one in names for full in _full(one) if full in targets), None)


def _turned(name: str, target: str, array: np.ndarray, *, back: bool = False) -> np.ndarray:
    """From torch's layout (out, in, *window) to Flax's (*window, in, out); back: the inverse.

    torch's transposed convolutions, (in, out, *window), become what Flax's take with transpose_kernel=True.
    """
    is_torchs = re.split(r"[./]", name)[-1] == "weight" and target.rpartition("/")[2] == "kernel"
    if not is_torchs or array.ndim < 2:
        return array
    first, last = (0, 1), (-1, -2)
    return np.moveaxis(array, last, first) if back else np.moveaxis(array, first, last)


def _unlike(name: str, weights: Weights, target: str, want: Any) -> str:
    """Why an array does not fit its target; "" if it fits."""
    have = weights.arrays[name]
    shape = _turned(name, target, np.broadcast_to(0, have.shape)).shape
    if shape == tuple(want.shape) and _kind(have.dtype) == _kind(np.dtype(want.dtype)):
        return ""
    turned = f" (turned to {list(shape)})" if shape != have.shape else ""
    return (
        f"{name} of the file is {have.dtype.name}{list(have.shape)}{turned}, {target} of the model is "
        f"{np.dtype(want.dtype).name}{list(want.shape)}"
    )


def _kind(dtype: np.dtype) -> str:
    return "f" if dtype.kind == "V" else dtype.kind  # numpy gives the floats of ml_dtypes the kind "V"


def _summary(weights: Weights, sources: Mapping[str, str], missing: list[str], over: list[str]) -> list[str]:
    """Lines with the number of arrays found, those missing in the file, and those of the file not used."""
    lines = [f"{len(sources)} of {len(sources) + len(missing)} arrays of the model ({weights.kind})"]
    if missing:
        lines.append(f"not filled: {_few([name.removeprefix('params/') for name in missing])}")
    if over:
        lines.append(f"not used: {_few(over)}")
    return lines


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
