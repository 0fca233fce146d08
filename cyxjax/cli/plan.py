"""`cyxjax plan --config X`: the step of an experiment, compiled and read, not run."""

from collections.abc import Sequence
from typing import Any

from cyxjax.config.help import Command
from cyxjax.config.load import load_config
from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.observe.compiled_plan import collectives, memory_bytes, plan_lines, state_bytes

_COMMAND = Command(
    "cyxjax plan",
    "Compiles one step of an experiment and shows what it sends and holds. Trains nothing, writes nothing.",
    "cyxjax plan --config configs/digits.yaml --comm zero1",
)


def main(argv: Sequence[str]) -> int:
    """Prints what a step sends and holds, with the words of `cyxjax.train`; writes nothing."""
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
    process_group.finalize()
    return EXIT_OK
