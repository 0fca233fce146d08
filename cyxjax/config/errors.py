"""One line per error in a configuration: source, key, what was found, and the nearest valid name."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from cyxjax.errors import ConfigError, DataError

Source = str | Callable[[str], str]  # where values came from: a text, or a function of the dotted key


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The type of a field if it is a section, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def field_at(model: type[BaseModel], loc: Iterable[str | int]) -> Any:
    """The type of the field at `loc` below `model`; None where there is no such field.

    Inside an open dict (`options`) every deeper key has the type of its values, mostly Any; in a list, of its
    items.
    """
    kind: Any = model
    for part in loc:
        section = section_of(kind)
        if section is None:
            inside = {dict: 1, list: 0, tuple: 0}.get(get_origin(kind))
            kind = kind if kind is Any else None if inside is None else get_args(kind)[inside]
            continue
        field = section.model_fields.get(str(part))
        if field is None:
            return None
        kind = field.annotation
    return kind


# Names in other trainers -> our keys. The name of a key in one of our sections, such as `lr`, needs no row.
_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "batch"), "batch_size"),
    **dict.fromkeys(("clip_grad_norm", "grad_clip", "gradient_clip_val"), "max_grad_norm"),
    **dict.fromkeys(
        ("accumulate_grad_batches", "grad_accumulation", "accumulation"), "gradient_accumulation_steps"
    ),
    **dict.fromkeys(("output_dir", "save_dir", "default_root_dir", "log_dir"), "run_dir"),
    **dict.fromkeys(("fp16", "bf16", "mixed_precision", "amp"), "precision"),
    **dict.fromkeys(("strategy", "ddp", "distributed"), "comm"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule.name"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.name"),
    **dict.fromkeys(("criterion", "loss_fn"), "loss"),
    "hidden": "model.options.hidden",
    "gradient_checkpointing": "remat",
    "data_dir": "data.root",
    "patience": "early_stopping_patience",
    **dict.fromkeys(("pretrained", "checkpoint", "load_from", "weights"), "init_from.path"),
    **dict.fromkeys(("freeze", "frozen", "unfreeze"), "trainable"),
    "deterministic": "reproducibility",
    "workers": "num_workers",
    **dict.fromkeys(("extends", "defaults", "include", "inherit", "_base_"), "base"),
}
# Keys of an experiment that a DistributedTrainingConfig does not have.
_OF_AN_EXPERIMENT = {
    *("model", "data", "loss", "optimizer", "lr", "weight_decay", "schedule", "metrics", "callbacks"),
    *("run_dir", "sinks", "wandb", "report"),
}


def where_it_belongs(key: str, model: type[BaseModel], loc: Iterable[str | int] = ()) -> str:
    """A hint for the unknown `key` at `loc`: the section that has it, our name, or the nearest name."""
    everywhere, ours = list(_paths(model)), _ELSEWHERE.get(key, key)
    homes = [path for path in everywhere if path.rpartition(".")[2] == key]
    if homes:
        return f"Use {' or '.join(homes)}."
    if "model" not in model.model_fields and ours.partition(".")[0] in _OF_AN_EXPERIMENT:
        return "In a program, pass it to the optimizer, cx.DistributedTrainer(...) or fit(...)."
    if ours != key and (ours == "base" or field_at(model, ours.split(".")) is not None):
        return f"Use {ours}."
    section = section_of(field_at(model, loc)) or model
    known = {path.rpartition(".")[2]: path for path in everywhere} | {
        key: key for key in section.model_fields
    }
    close = difflib.get_close_matches(key, known, 1)
    return f"Did you mean {known[close[0]]!r}?" if close else "No key has a similar name."


def _paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted names of all keys in all sections."""
    for name, field in model.model_fields.items():
        yield above + name
        section = section_of(field.annotation)
        if section is not None:
            yield from _paths(section, f"{above}{name}.")


@contextmanager
def blamed(config: Any, section: str = "") -> Iterator[None]:
    """Adds the source of the value to a ConfigError about a value of `config` or of its `section`, and the
    source of the section, if one is given, to a DataError.
    """
    try:
        yield
    except (ConfigError, DataError) as err:
        kind, own = (ConfigError, err.key) if isinstance(err, ConfigError) else (DataError, "")
        key = ".".join(filter(None, (section, own)))
        if not key:
            raise
        text = str(err) if str(err).startswith(key) else f"{key}: {err}"
        raise kind(f"{_where(vars(config)['_source'], key)}: {text}") from err


def _where(source: Source, key: str) -> str:
    """The file or command line that set `key`; all sources for the key ""."""
    return source if isinstance(source, str) else source(key)


def explain(
    err: ValidationError,
    model: type[BaseModel],
    source: Source,
    assigned: str | None = None,
) -> str:
    """All errors of `err`, one per line, with one hint at the end.

    `source` says where a dotted key came from (a text, or a function of the key).
    """
    lines: dict[tuple, str] = {}  # of a field with several types, the last error is used: it lists the names
    for error in err.errors(include_url=False):
        loc = _field_of(error["loc"] or ((assigned,) if assigned else ()), model)
        where = _where(source, ".".join(map(str, loc)))
        lines[loc] = f"{where}: {_sentence(dict(error), loc, model)}"
    hint = "HINT: `python -m cyxjax.train --help` lists every key with its default."
    return "\n".join(lines.values()) + f" {hint}"


def _field_of(loc: tuple[str | int, ...], model: type[BaseModel]) -> tuple[str | int, ...]:
    """`loc` without the type that was tried, which pydantic may append to the name of a field."""
    above = field_at(model, loc[:-1]) if len(loc) > 1 and isinstance(loc[-1], str) else None
    is_type = above is not None and section_of(above) is None and field_at(model, loc) is None
    return loc[:-1] if is_type else loc


def _sentence(error: dict[str, Any], loc: tuple[str | int, ...], model: type[BaseModel]) -> str:
    key = ".".join(map(str, loc))
    if error["type"] in ("extra_forbidden", "no_such_attribute"):
        return f"unknown key {key!r}. {where_it_belongs(str(loc[-1]), model, loc[:-1])}"
    if error["type"] in ("model_type", "model_attributes_type"):
        first = next(iter(field_at(model, loc).model_fields))
        return f"{key} = {_short(error.get('input'))}: this is a section, expected `{key}: {{{first}: ...}}`."
    message = error["msg"].removeprefix("Value error, ").removesuffix(".").replace("valid tuple", "list")
    if not loc:
        return f"{message}."
    value, end = error.get("input"), "" if message.endswith("?") else "."
    return f"{key} = {_short(value)}: {message[:1].lower()}{message[1:]}{end}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
