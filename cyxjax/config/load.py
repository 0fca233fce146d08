"""Builds one checked `TrainConfig` from YAML files and the command line; writes nothing.

Files and command line are merged as plain values and checked once, so that all give the same messages, and
it stays known which keys were given. The help page is made from the same models.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args, get_origin

from cyxjax.command import show
from cyxjax.config.command_line import from_text, names, parse_overrides
from cyxjax.config.errors import field_at
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.help import Command, help_page
from cyxjax.config.yaml_file import read_yaml
from cyxjax.errors import ConfigError
from cyxjax.files import dotted
from cyxjax.redaction import is_secret_name, redact
from cyxjax.run_folder import CHECKPOINTS, RunFolder

TRAIN = Command(
    "python -m cyxjax.train",
    "Trains the experiment in a YAML file. Run the same command again to continue where it stopped.",
    "python -m cyxjax.train --config configs/digits.yaml --epochs 10 --optimizer.lr 0.01",
)


class Layer(NamedTuple):
    """The values of one source; a later layer overrides an earlier one."""

    source: str  # a file, or "command line"
    values: dict[str, Any]

    @property
    def keys(self) -> list[str]:
        """The dotted keys that it sets."""
        return [key for key, _ in dotted(self.values)]


def load_config(
    argv: Sequence[str], command: Command = TRAIN, env: Mapping[str, str] = MappingProxyType({})
) -> TrainConfig:
    """The experiment that `argv` describes: `--config FILE ...`, then overrides such as `--optimizer.lr 0.1`.

    `env`: the variables that files may use as `${env:NAME}`.
    Raises: ConfigError for anything wrong; SystemExit(0) after `--help` (the page of `command`) or
        `--print-config`.
    """
    given = parse_overrides(argv, TrainConfig)
    layers = [layer for file in given.config_files for layer in _read_layers(file, env)]
    layers.append(Layer("command line", given.values))
    values: dict[str, Any] = {"run_dir": f"runs/{Path(['train', *given.config_files][-1]).stem}"}
    for layer in layers:
        values = merge(values, layer.values)

    source = Sources(tuple(layers))
    refuse_secrets(values, source)
    config = TrainConfig.from_values(values, source)
    if config.fast_dev_run:
        fast = Layer("fast_dev_run", _fast(config))
        config = TrainConfig.from_values(merge(values, fast.values), Sources((*layers, fast)))
    if given.help or given.print_config:
        show(help_page(command, config) if given.help else config.to_yaml())
        raise SystemExit(0)
    return config


@dataclass(frozen=True)
class Sources:
    """Returns the source that set a dotted key; all sources for the key ""."""

    layers: tuple[Layer, ...]

    def __call__(self, key: str) -> str:
        found = [layer.source for layer in self.layers if layer.keys and (not key or names(layer.keys, key))]
        if not found:
            return self.layers[0].source
        return found[-1] if key else ", ".join(found)

    def lines(self, resolved: Collection[str]) -> Iterator[str]:
        """A line for each source, with the keys whose value in `resolved` it gave."""
        for number, layer in enumerate(self.layers):
            later = {key for other in self.layers[number + 1 :] for key in other.keys}
            keys = [
                key for key in sorted(layer.keys) if key.split(".")[0] in resolved and not names(later, key)
            ]
            if keys:
                yield f"{layer.source}: {', '.join(keys)}"


def _read_layers(path: str, env: Mapping[str, str], above: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of the file `path`, those of its `base` first. above: the files that have it as a base."""
    here = Path(path).resolve()
    if here in above:
        raise ConfigError(f"{path}: base: the file is its own base. HINT: remove one of these `base` keys.")
    values = _fill(read_yaml(path), TrainConfig, env, path)
    base = values.pop("base", None)
    below = _read_layers(str(Path(path).parent / str(base)), env, (*above, here)) if base else []
    return [*below, Layer(path, values)]


_FROM_ENV = re.compile(r"\$\{env:([A-Za-z_]\w*)(?::([^{}]*))?\}")


def _fill(value: Any, kind: Any, env: Mapping[str, str], path: str) -> Any:
    """`value` of a `kind` in the file `path`, with each `${env:NAME}` and `${env:NAME:default}` replaced."""
    if isinstance(value, dict):
        return {key: _fill(one, field_at(kind, [key]), env, path) for key, one in value.items()}
    if isinstance(value, list):
        item = (*get_args(kind), Any)[0] if get_origin(kind) in (tuple, list) else Any
        return [_fill(one, item, env, path) for one in value]
    if not isinstance(value, str) or not _FROM_ENV.search(value):
        return value

    def variable(found: re.Match[str]) -> str:
        name, default = found.groups()
        if is_secret_name(name):
            raise ConfigError(
                f"{path}: {found[0]}: {name} looks like a secret, and the configuration is copied into the "
                "run folder. HINT: let the program that needs it read the variable."
            )
        if env.get(name, default) is None:
            raise ConfigError(
                f"{path}: {found[0]}: {name} is not set. HINT: export {name}=..., or ${{env:{name}:default}}."
            )
        return env.get(name, default)

    return from_text(_FROM_ENV.sub(variable, value), kind, f"{path}: {value}")


def open_run(root: Path) -> RunFolder:
    """The run folder `root`, with the checkpoint folder that its configuration names, or the default one.

    Raises: ConfigError for a configuration that cannot be read.
    """
    config = RunFolder(root).config
    values = read_yaml(str(config)) if config.exists() else {}
    return RunFolder(root, str(values.get("checkpoint_dir", CHECKPOINTS)))


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`; dicts are merged key by key, all else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if key == "init_from":  # a path alone is a section with that path
            old, value = ({"path": one} if isinstance(one, str) else one for one in (old, value))
        if key == "options" and value is None:  # those of another name are not wanted
            old, value = None, {}
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    for key, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        if over.get(key) is not None and other not in over:
            merged.pop(other, None)  # the later source uses the other key
    return merged


def refuse_secrets(values: dict[str, Any], source: Any) -> None:
    """Raises ConfigError for a text under a key such as api_key or password: run folders are shared."""
    for name, value in dotted(values):
        named = is_secret_name(name) and not name.startswith("init_from.map.")  # names of parameters
        if isinstance(value, str) and value and (named or redact(value) != value):
            raise ConfigError(
                f"{source(name)}: {name} looks like a secret, and the configuration is copied into the run "
                "folder. HINT: put it into an environment variable (for W&B: WANDB_API_KEY)."
            )


def _fast(config: TrainConfig) -> dict[str, Any]:
    """What `fast_dev_run` changes: two steps, two evaluation batches, and no effect on a real run."""
    return {
        "checkpoint_every_n_epochs": 0,
        "checkpoint_every_n_steps": 0,
        "checkpoint_every_n_minutes": 0,
        "epochs": 1,
        "max_steps": 2,
        "max_eval_batches": 2,
        "log_every_n_batches": 1,
        "resume": "never",
        "sinks": ["jsonl"],
        "run_dir": config.run_dir.removesuffix("-fast-dev-run") + "-fast-dev-run",
        "report": False,
        "mirror": None,
    }
