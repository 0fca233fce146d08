"""The sections of an experiment file, and the habits all of them share (no jax here).

A section is flat: a `name` that picks one of several things, and the numbers that thing takes.
"""

import re
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
)

from cyxjax.errors import ConfigError
from cyxjax.files import scientific
from cyxjax.plugins import is_known, known_or

_VARIABLE = re.compile(r"\$\{|^\$\w+(/|$)")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SPAN = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def _numbers(tree: Any) -> Any:
    """`tree` with texts such as "1e-3" as floats, at any depth of dicts and lists."""
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_numbers(value) for value in tree]
    return scientific(tree)


def seconds(value: Any) -> Any:
    """Seconds from a number or a text such as "90s", "30m", "1h30m", "2d"; anything else unchanged.

    Raises: ValueError for a text that is neither.
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        found = _SPAN.fullmatch(value.strip())
    if not value.strip() or found is None:
        raise ValueError("expected seconds or a text such as 90s, 30m, 1h30m")
    return sum(float(n) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True) if n)


Options = Annotated[dict[str, Any], BeforeValidator(_numbers)]
# Above what any run needs, and below what overflows where it is converted: steps are counted in int32.
Count = Annotated[int, Field(le=10**9)]
Amount = Annotated[float, Field(le=1e12)]
Seconds = Annotated[Amount, BeforeValidator(seconds, json_schema_input_type=float | str)]


def _named(value: Any) -> Any:
    """A name, or {name, options}, as {name, options}. Raises: ValueError for anything else."""
    one = {"name": value} if isinstance(value, str) else value
    if not isinstance(one, dict) or not isinstance(one.get("name"), str) or one.keys() - {"name", "options"}:
        raise ValueError("expected a name, or `{name: ..., options: {...}}`")
    options = one.get("options") or {}
    if not isinstance(options, dict):
        raise ValueError("expected options as `{key: value}`")
    return {"name": one["name"], "options": _numbers(options)}


def _name_or_named(value: Any) -> Any:
    """A name as it is; {name, options} as `_named` has it, without options as the name."""
    found = value if isinstance(value, str) else _named(value)
    return found["name"] if isinstance(found, dict) and not found["options"] else found


def _optimizer(name: str) -> str:
    known = dict.fromkeys(OPTIMIZERS + OPTAX + OPTAX_CONTRIB + TOLD_THE_LOSS)
    if name in WANT_THE_LOSS:
        raise ValueError(
            f"it asks for the value of the loss, and is no rule by itself; {WANT_THE_LOSS[name]}"
        )
    if not is_known("optimizer", name, known):
        raise ValueError(f"no optimizer of this name. {known_or('optimizer', name, known)}")
    return name


def _sink(name: str) -> str:
    if not is_known("sink", name, dict.fromkeys(_SINKS)):
        raise ValueError(f"no sink of this name. {known_or('sink', name, dict.fromkeys(_SINKS))}")
    return name


OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb", "lion", "adagrad", "rmsprop")
OPTAX = (  # further ones by optax's names; a test holds that they are all that need nothing but gradients
    *("adabelief", "adadelta", "adafactor", "adamax", "adamaxw", "adan", "amsgrad", "fromage", "lars"),
    *("nadam", "nadamw", "noisy_sgd", "novograd", "optimistic_adam_v2"),
    *("optimistic_gradient_descent", "radam", "rprop", "sign_sgd", "signum", "sm3", "yogi"),
)
OPTAX_CONTRIB = (  # of optax.contrib; its schedule_free rules evaluate other parameters than they train
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad", "muon"),
    *("prodigy", "simplified_ademamix"),
)
TOLD_THE_LOSS = ("polyak_sgd",)  # they are given the mean of a step's global batch
WANT_THE_LOSS = {  # optax's rules that search along the loss, or need a rule before them -> what to take
    "reduce_on_plateau": "take the callback ReduceLROnPlateau",
    "lbfgs": "take optax.lbfgs(lr, linesearch=None), which works as any rule, or adam",
}
_SINKS = ("jsonl", "csv", "tensorboard", "wandb", "trackio", "mlflow")
Named = Annotated[dict[str, Any], BeforeValidator(_named, json_schema_input_type=str | dict[str, Any])]
NameOrNamed = Annotated[str | dict[str, Any], BeforeValidator(_name_or_named)]
OptimizerName = Annotated[str, AfterValidator(_optimizer)]
SinkName = Annotated[str, AfterValidator(_sink)]


def accepts_bool(annotation: Any) -> bool:
    """Whether a field of this type may hold true/false."""
    if get_origin(annotation) in (Annotated, UnionType) or get_origin(annotation) is not None:
        return any(accepts_bool(part) for part in get_args(annotation))
    return annotation in (bool, Any)


def _refuse_shell(value: Any) -> None:
    """Raises: ValueError for what only a shell fills in, at any depth: it would be taken by the letter."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_shell(part)
    elif isinstance(value, str) and _VARIABLE.search(value):
        raise ValueError(
            "a variable is written ${env:NAME} or ${env:NAME:default}, and in a file only; write that, or "
            "give the value on the command line, where the shell fills it in"
        )
    elif isinstance(value, str) and (value == "~" or value.startswith("~/")):
        raise ValueError(
            "`~` is filled in by a shell, not here; write the whole path, or give it on the command line"
        )


def on_this_machine(path: str | None) -> str | None:
    """`path`. Raises: ValueError for an address elsewhere, which would be taken for a folder here, and for an
    empty text, which would be taken for the folder one happens to be in.
    """
    if path is not None and not path.strip():
        raise ValueError("is empty (an unset variable of the shell?); expected a path")
    if path is not None and (found := _SCHEME.match(path)):
        raise ValueError(
            f"{found[0]} is neither read nor written here; expected a path of this machine (mount or "
            "copy it); `mirror` names where a run folder is copied to"
        )
    return path


class Strict(BaseModel):
    """A section: unknown keys, infinities and true/false for a number are errors, also on assignment."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # most sections are built as a part of another
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        if isinstance(value, bool) and not accepts_bool(field.annotation):
            raise ValueError("true/false where another kind of value belongs")
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            _refuse_shell(value)  # a section looks at its own
        return value

    if not TYPE_CHECKING:  # a type checker then knows which fields there are

        def __setattr__(self, name: str, value: Any) -> None:
            before, given = dict(self.__dict__), set(self.__pydantic_fields_set__)
            try:
                super().__setattr__(name, value)
            except ValidationError as err:
                # pydantic has stored the value before a check over several fields refuses it
                object.__setattr__(self, "__dict__", before)
                object.__setattr__(self, "__pydantic_fields_set__", given)
                from cyxjax.config.errors import explain

                raise ConfigError(explain(err, type(self), type(self).__name__, name)) from None


class ModelConfig(Strict):
    """The network."""

    name: str = "mlp"
    """A name of the registry (mlp, cnn, resnet18, resnet50, vae, gpt) or `package.module:callable`."""
    options: Options = {}
    """Options of the network, for example `hidden: [128, 64]`."""


class DataConfig(Strict):
    """The dataset."""

    name: str = "digits"
    """A name of the catalogue (digits, mnist, cifar10, npz, csv, text, ...) or `package.module:function`."""
    root: str | None = None
    """Folder or file the data is read from; none for data that comes with a library."""
    options: Options = {}
    """Options of the format, for example `sequence_length: 64`."""
    augment: tuple[Named, ...] = ()
    """Augmentation of training samples on the device: names of dm-pix, or `module:function`."""

    _local = field_validator("root")(on_this_machine)


class GroupConfig(Strict):
    """Settings for a group of parameters."""

    match: str = Field(min_length=1)
    """Names of parameters, `*` for any part: `encoder/*`, `*/bias`. The first group that matches counts."""
    lr: Amount | None = Field(default=None, gt=0)
    """Peak learning rate; none: the optimizer's."""
    weight_decay: Amount | None = Field(default=None, ge=0)
    """Weight decay; none: the optimizer's."""
    frozen: bool = False
    """Not trained at all: no gradient, no optimizer state."""


def _group(value: Any) -> dict[str, Any]:
    """A group as plain values. Raises: ValueError saying which key is wrong."""
    if not isinstance(value, dict):
        raise ValueError("expected `{match: PATTERN, lr: NUMBER}`")
    try:
        return GroupConfig(**value).model_dump(exclude_unset=True)
    except ValidationError as err:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
        raise ValueError("; ".join(found)) from None


Group = Annotated[dict[str, Any], BeforeValidator(_group)]


class OptimizerConfig(Strict):
    """The optimizer."""

    name: OptimizerName = "adam"
    """sgd, momentum, adam, adamw, lamb, lion, adagrad, rmsprop, another of optax, or module:attribute."""
    options: Options = {}
    """Arguments of the optimizer by optax's (or your) names, for example `b2: 0.95`."""
    lr: Amount = Field(default=0.001, gt=0)
    """Peak learning rate, before `lr_scaling`."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of `momentum` and `rmsprop`; `sgd` has none."""
    nesterov: bool = False
    """Look-ahead form of `momentum`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments of adam, adamw, lamb and lion."""
    eps: Amount = Field(default=1e-8, gt=0)
    """Added to the denominator of the adaptive rules."""
    weight_decay: Amount = Field(default=0.0, ge=0)
    """Decoupled decay for adamw, lamb and lion; an L2 term of the gradient for the others."""
    groups: tuple[Group, ...] = ()
    """Settings for parameters by name, for example `[{match: "encoder/*", lr: 0.0001}]`."""

    @model_serializer(mode="wrap")
    def _given(self, dump: Any) -> dict[str, Any]:
        """As plain values; of a rule that is not ours, whose defaults are its own, only what was given."""
        values = dump(self)
        keys = values if self.name in OPTIMIZERS else self.model_fields_set
        return {key: value for key, value in values.items() if key in keys}

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must lie in [0, 1)")
        return betas


class WandbConfig(Strict):
    """Weights & Biases, used when `sinks` names it. Its key comes from `wandb login` or WANDB_API_KEY."""

    project: str = "cyxjax"
    """Project the run belongs to."""
    run_name: str | None = None
    """Name shown for the run; none: the run folder's name."""
    mode: Literal["offline", "online", "disabled"] = "offline"
    """Offline writes into the run folder, for `wandb sync` later."""
    init_timeout: Amount = Field(default=120.0, gt=0)
    """Seconds to wait for the service before training goes on without it."""
