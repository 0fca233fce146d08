"""The sections that say where parameters begin, and which are trained (no jax here)."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cyxjax.config.sections import Amount, Strict, on_this_machine

Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda v: (v,) if isinstance(v, str) else v, json_schema_input_type=str | tuple[str, ...]
    ),
]


class InitFromConfig(Strict):
    """Initial values that were trained elsewhere: a path, or a path with rules for names."""

    path: str | None = None
    """safetensors (a file, or a folder of shards), a run folder, orbax, flax msgpack, torch state_dict."""
    map: dict[str, str | None] = {}
    """Name in the file -> in the model, `*` any text, null to leave out: "enc.*.weight": "Enc_*/kernel"."""
    strict: bool = True
    """Every array of the model must be found and every one of the file used; false: use what matches."""

    _local = field_validator("path")(on_this_machine)

    @property
    def rules(self) -> dict[str, str | None]:
        return self.map


class LoraConfig(Strict):
    """LoRA: the model is frozen, and low-rank adapters beside its kernels are trained."""

    rank: int = Field(default=0, ge=0, le=2**16)
    """Rank of the adapters; 0: no adapters."""
    alpha: Amount = Field(default=16.0, gt=0)
    """The product of an adapter is scaled by alpha / rank."""
    pattern: Patterns = ("*kernel",)
    """Names of the kernels that get adapters, `*` for any text: "attention/*/kernel"."""

    @model_validator(mode="after")
    def _says_its_rank(self) -> "LoraConfig":
        """`rank: 0` turns adapters off; a section that only forgot it would train the whole model."""
        if self.model_fields_set and "rank" not in self.model_fields_set:
            raise ValueError("rank is missing; expected a number such as rank: 8, or 0 for no adapters")
        return self


def _as_path(value: Any) -> Any:
    """`init_from: PATH` for `init_from: {path: PATH}`."""
    return {"path": str(value)} if isinstance(value, str | Path) else value


InitFrom = Annotated[InitFromConfig, BeforeValidator(_as_path, json_schema_input_type=str | InitFromConfig)]
