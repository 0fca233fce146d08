"""`cyxjax plan --config X`: the step of an experiment, compiled and read, not run."""

from collections.abc import Sequence
from typing import Any

from cyxjax.config.help import Command
from cyxjax.config.load import load_config
from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.observe.compiled_plan import collectives, memory_bytes, plan_lines, state_bytes

_GB = "--device-gb"
_ON_CPU = "plan in one process, with `--cpu-devices 4` where there are fewer devices"
_COMMAND = Command(
    "cyxjax plan",
    "Compiles one step of an experiment and shows what it sends and holds. Trains nothing, writes nothing. "
    "With --device-gb N it also shows what a replica would hold at 1 to 4,096 replicas under mean, zero1 and "
    "fsdp, and names the cheapest that fits N GB.",
    "cyxjax plan --config configs/digits.yaml --comm zero1",
)


def main(argv: Sequence[str]) -> int:
    """Prints what a step sends and holds, with the words of `cyxjax.train`; writes nothing."""
    device_gb, argv = without_device_gb(argv)
    config = load_config(argv, _COMMAND)
    if config.reproducibility == "exact":
        raise ConfigError(
            "a plan is of one program, and a step with reproducibility='exact' is several. "
            "HINT: plan with --reproducibility none; exact sends about as much."
        )
    from cyxjax.distributed import process_group
    from cyxjax.train.experiment import prepare
    from cyxjax.train.loop import Position

    _, _, trainer, prepared = prepare(config)
    assert prepared.feed is not None
    batch = next(iter(prepared.feed.train(Position(), lambda: (False, False)))).batch
    step: Any = trainer.program.train_step
    compiled = step.lower(trainer.state, batch).compile()
    if trainer.is_master():
        found = collectives(compiled.as_text())
        print(f"comm: {config.comm}, precision: {config.precision}, remat: {config.remat}")
        print("\n".join(plan_lines(found, state_bytes(trainer.state), memory_bytes(compiled))))
        if device_gb is not None:
            print("\n".join(_by_replicas(trainer, prepared, batch, device_gb)))
    process_group.finalize()
    return EXIT_OK


def without_device_gb(argv: Sequence[str]) -> tuple[float | None, list[str]]:
    """(the value of --device-gb, the words without it). Raises: ConfigError for no positive number."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{_GB}=") else [word])]
    if _GB not in words:
        return None, words
    at = words.index(_GB)
    text = words[at + 1] if at + 1 < len(words) else ""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"{_GB} {text!r}: expected the memory of a device in GB. HINT: {_GB} 16")
    return found, words[:at] + words[at + 2 :]


def _by_replicas(trainer: Any, prepared: Any, batch: Any, device_gb: float) -> list[str]:
    import jax

    from cyxjax.train.memory_plan import held_by, table

    devices = jax.devices()
    if len(devices) < 4 or len(devices) != jax.local_device_count():
        return [f"memory at other numbers of replicas is read from two programs. HINT: {_ON_CPU}"]
    return table(list(held_by(trainer.recipe, prepared, devices, batch)), device_gb * 1e9)
