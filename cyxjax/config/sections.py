"""The sections of an experiment file (no jax here).

A section is flat: a `name` that selects one of several implementations, and its parameters.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    model_serializer,
    model_validator,
)

from cyxjax.config.values import Amount, Count, Here, Named, Options, Strict, one_of

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb", "lion", "adagrad", "rmsprop")
OPTAX = (  # by optax's names; a test checks that these are all others that need only gradients
    *("adabelief", "adadelta", "adafactor", "adamax", "adamaxw", "adan", "amsgrad", "fromage", "lars"),
    *("nadam", "nadamw", "noisy_sgd", "novograd", "optimistic_adam_v2"),
    *("optimistic_gradient_descent", "radam", "rprop", "sign_sgd", "signum", "sm3", "yogi"),
)
OPTAX_CONTRIB = (  # without the schedule_free rules, which evaluate different parameters than they train
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore", "madgrad", "muon"),
    *("prodigy", "simplified_ademamix"),
)
TOLD_THE_LOSS = ("polyak_sgd",)  # they receive the mean loss of a step's global batch
SINKS = ("jsonl", "csv", "tensorboard", "wandb", "trackio", "mlflow")
SCHEDULES = ("constant", "cosine", "linear")
OPTAX_SCHEDULES = (  # by optax's names; the initial or peak value is 1, a factor of optimizer.lr
    *("exponential_decay", "polynomial_schedule", "piecewise_constant_schedule", "cosine_onecycle_schedule"),
    *("linear_onecycle_schedule", "piecewise_interpolate_schedule", "warmup_exponential_decay_schedule"),
    *("warmup_cosine_decay_schedule", "warmup_constant_schedule", "cosine_decay_schedule", "linear_schedule"),
    "sgdr_schedule",  # the values of each cycle are given
)


OptimizerName = Annotated[str, one_of("optimizer", OPTIMIZERS + OPTAX + OPTAX_CONTRIB + TOLD_THE_LOSS)]
SinkName = Annotated[str, one_of("sink", SINKS)]
ScheduleName = Annotated[str, one_of("schedule", SCHEDULES + OPTAX_SCHEDULES)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda v: (v,) if isinstance(v, str) else v, json_schema_input_type=str | tuple[str, ...]
    ),
]


class ModelConfig(Strict):
    """The network."""

    name: str = "mlp"
    """A name in the registry (mlp, cnn, resnet18, resnet50, vae, gpt) or `package.module:callable`."""
    options: Options = {}
    """Options of the network, for example `hidden: [128, 64]`."""


class DataConfig(Strict):
    """The dataset."""

    name: str = "digits"
    """A name in the catalogue (digits, mnist, cifar10, npz, csv, text, ...) or `package.module:function`."""
    root: Here[str | None] = None
    """Folder or file the data is read from; none for data that comes with a library."""
    options: Options = {}
    """Options of the format, for example `sequence_length: 64`."""
    augment: tuple[Named, ...] = ()
    """Augmentations of training samples on the device: functions of dm-pix, or `module:function`."""


class GroupConfig(Strict):
    """Settings for a group of parameters."""

    match: str = Field(min_length=1)
    """Pattern of parameter names, `*` for any text: `encoder/*`, `*/bias`. The first match applies."""
    lr: Amount | None = Field(default=None, gt=0)
    """Peak learning rate; none: the optimizer's."""
    weight_decay: Amount | None = Field(default=None, ge=0)
    """Weight decay; none: the optimizer's."""
    frozen: bool = False
    """Not trained at all: no gradient, no optimizer state."""

    @model_serializer(mode="wrap")
    def _given(self, dump: Any) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if key in self.model_fields_set}


class OptimizerConfig(Strict):
    """The optimizer."""

    name: OptimizerName = "adam"
    """sgd, momentum, adam, adamw, lamb, lion, adagrad, rmsprop, any other of optax, or module:attribute."""
    options: Options = {}
    """Further arguments of the optimizer, by optax's (or your) names, for example `b2: 0.95`."""
    lr: Amount = Field(default=0.001, gt=0)
    """Peak learning rate, before `lr_scaling`."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of `momentum` and `rmsprop`; `sgd` has none."""
    nesterov: bool = False
    """Use Nesterov's form of `momentum`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the two moments of adam, adamw, lamb and lion."""
    eps: Amount = Field(default=1e-8, gt=0)
    """Added to the denominator of adam, adamw, lamb, adagrad and rmsprop."""
    weight_decay: Amount = Field(default=0.0, ge=0)
    """Decoupled weight decay for adamw, lamb and lion; an L2 term in the gradient for the others."""
    groups: tuple[GroupConfig, ...] = ()
    """Settings for parameters by name, for example `[{match: "encoder/*", lr: 0.0001}]`."""

    @model_serializer(mode="wrap")
    def _given(self, dump: Any) -> dict[str, Any]:
        """Plain values; of an optimizer that is not ours, which has its own defaults, only those given."""
        values = dump(self)
        keys = values if self.name in OPTIMIZERS else self.model_fields_set
        return {key: value for key, value in values.items() if key in keys}


class WandbConfig(Strict):
    """Weights & Biases, used if `sinks` names it. The API key comes from `wandb login` or WANDB_API_KEY."""

    project: str = "cyxjax"
    """Project the run belongs to."""
    run_name: str | None = None
    """Name shown for the run; none: the run folder's name."""
    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline: write into the run folder, to upload later with `wandb sync`."""
    init_timeout: Amount = Field(default=120.0, gt=0)
    """Seconds to wait for the service before training continues without it."""


class ScheduleConfig(Strict):
    """The learning rate after the warm-up (`warmup_steps`), as a function of optimizer steps."""

    name: ScheduleName = "constant"
    """constant, cosine, linear, optax's (exponential_decay, ...), or module:attribute (step -> factor)."""
    options: Options = {}
    """Arguments of an optax schedule, or of your own, by name, for example `transition_steps: 100`."""
    decay_steps: Count | None = Field(default=None, ge=1)
    """Steps from the end of the warm-up to the final rate; none: to the end of the run (cosine, linear)."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak (cosine and linear)."""


class InitFromConfig(Strict):
    """Initial parameters that were trained elsewhere: a path, or a path with rules for names."""

    path: Here[str | None] = None
    """A path: safetensors (file or folder of shards), a run folder, orbax, flax msgpack, torch state_dict."""
    map: dict[str, str | None] = {}
    """Name in the file -> in the model; `*`: any text; null: ignore. "enc.*.weight": "Enc_*/kernel"."""
    strict: bool = True
    """Every array of the model must be found, and every array of the file used; false: use what matches."""


class LoraConfig(Strict):
    """LoRA: the model is frozen, and low-rank adapters beside its kernels are trained."""

    rank: int = Field(default=0, ge=0, le=2**16)
    """Rank of the adapters; 0: no adapters."""
    alpha: Amount = Field(default=16.0, gt=0)
    """The product of an adapter's two factors is scaled by alpha / rank."""
    pattern: Patterns = ("*kernel",)
    """Names of the kernels that get adapters, `*` for any text: "attention/*/kernel"."""

    @model_validator(mode="after")
    def _says_its_rank(self) -> "LoraConfig":
        """Refuses a section without `rank`, which would train the whole model; `rank: 0` says so."""
        if self.model_fields_set and "rank" not in self.model_fields_set:
            raise ValueError("rank is missing; expected a number such as rank: 8, or 0 for no adapters")
        return self


def _as_path(value: Any) -> Any:
    """`init_from: PATH` for `init_from: {path: PATH}`; null for no weights."""
    if value is None:
        return {}
    return {"path": str(value)} if isinstance(value, str | Path) else value


InitFrom = Annotated[
    InitFromConfig, BeforeValidator(_as_path, json_schema_input_type=str | InitFromConfig | None)
]
