"""`cyxjax plan --config X`: compiles one step of an experiment and shows what it costs; trains nothing."""

import json
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from cyxjax.config.help import Command
from cyxjax.config.load import load_config
from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.launch.environment import here
from cyxjax.observe import scaling
from cyxjax.observe.compiled_plan import bytes_per_step, collectives, memory_bytes, plan_lines, state_bytes
from cyxjax.observe.lines import wrapped

_GB = "--device-gb"
_OWN = {  # options that are no key of an experiment -> an example of their value
    _GB: "16",
    "--bandwidth": "100Gbit",
    "--latency": "5us",
    "--mtbf": "1000h",
    "--restart": "60s",
    "--replicas": "1:4096",
}
_WIRE = {"--bandwidth": "10Gbit", "--latency": "20us"}
_STEPS, _WARM = 13, 3
_ON_CPU = "plan in one process, with `--cpu-devices 4` where there are fewer devices"
_COMMAND = Command(
    "cyxjax plan",
    "Compiles one step of an experiment and shows what it sends, holds and computes. Writes nothing. "
    "--device-gb N: what a replica would hold at 1 to 4,096 replicas under mean, zero1 and fsdp, and the "
    "cheapest that fits N GB. --bandwidth 100Gbit, --latency 5us, --replicas 1:4096 (any of them): runs some "
    "steps here and predicts the time of a step and an epoch at other numbers of replicas, by strategy. "
    "--mtbf 1000h (of a host), --restart 60s: how often to save, and the expected goodput. "
    "--json: all of it but --device-gb as one JSON object.",
    "cyxjax plan --config configs/digits.yaml --bandwidth 10Gbit --latency 20us --mtbf 1000h",
)


def main(argv: Sequence[str]) -> int:
    """Prints what a step sends and holds, with the words of `cyxjax.train`; writes nothing."""
    as_json = "--json" in argv
    own, argv = own_options([word for word in argv if word != "--json"])
    config = load_config(argv, _COMMAND, here())
    if config.reproducibility == "exact":
        raise ConfigError(
            "a plan is of one program, and a step with reproducibility='exact' is several. "
            "HINT: plan with --reproducibility none; exact sends about as much."
        )
    wish = Wish.of(own)
    from cyxjax.distributed import process_group
    from cyxjax.train.experiment import prepare
    from cyxjax.train.hooks.hook import Position

    _, _, trainer, plan = prepare(config)
    assert plan.feed is not None
    batch = next(iter(plan.feed.train(Position(), lambda: (False, False)))).batch
    step: Any = trainer.program.train_step
    state = trainer.state
    lowered = step.lower(state, batch)
    compiled = lowered.compile()
    held, facts = (
        state_bytes(state),
        _facts(lowered, compiled, state),
    )  # before the steps, which take the state
    drawn_out = wish.wire and _scaled(
        state, plan, trainer.program, compiled, batch
    )  # every rank: the steps are real
    if trainer.is_master() and as_json:
        facts |= {"comm": config.comm, "precision": config.precision}
        print(json.dumps(facts | (_scaling_facts(*drawn_out, wish) if drawn_out else {})))
    elif trainer.is_master():
        found = collectives(compiled.as_text())
        offload = f", offload: {config.offload}" if config.offload != "none" else ""
        how = f"comm: {config.comm}, precision: {config.precision}, remat: {config.remat}{offload}"
        work = f"computed in a step: {work_line(lowered.cost_analysis())}"
        _show([how, *plan_lines(found, held, memory_bytes(compiled)), work])
        if wish.device_gb is not None:
            _show(_by_replicas(plan, batch, wish.device_gb))
        if drawn_out:
            _show(_scaling_lines(*drawn_out, wish, plan.settings.step.batch.num_shares))
    process_group.finalize()
    return EXIT_OK


def _show(lines: Iterable[str]) -> None:
    """Prints `lines` in the columns of the terminal, at most 80."""
    width = min(80, shutil.get_terminal_size().columns)
    for line in lines:
        print(wrapped(line, width))


def _facts(lowered: Any, compiled: Any, state: Any) -> dict[str, Any]:
    """The facts of a step as plain values, for a script."""
    found = collectives(compiled.as_text())
    return {
        "sent_bytes_per_replica": bytes_per_step(found),
        "collectives": [asdict(one) for one in found],
        "state_bytes": state_bytes(state),
        "program_bytes": memory_bytes(compiled),
        "flops_per_replica": (lowered.cost_analysis() or {}).get("flops"),
    }


def work_line(cost: Mapping[str, float] | None) -> str:
    """FLOPs of a step, from the program before it is compiled: libraries hide theirs."""
    flops = (cost or {}).get("flops", 0.0)
    return f"{flops / 1e9:,.3f} GFLOP per replica" if flops > 0 else "unknown on this backend"


class Wish(NamedTuple):
    """The options of the command that are no keys of an experiment."""

    device_gb: float | None
    wire: scaling.Wire | None  # None: no curve
    mtbf_s: float | None
    restart_s: float
    replicas: tuple[int, ...]

    @classmethod
    def of(cls, own: Mapping[str, str]) -> "Wish":
        """Raises: ConfigError for a value that is none."""
        asked = (
            {**_WIRE, **own}
            if {"--bandwidth", "--latency", "--mtbf", "--replicas", "--restart"} & {*own}
            else {}
        )
        wire = None
        if asked:
            wire = scaling.Wire(
                scaling.rate(asked["--bandwidth"]), scaling.seconds("--latency", asked["--latency"])
            )
        return cls(
            _gigabytes(own[_GB]) if _GB in own else None,
            wire,
            scaling.seconds("--mtbf", own["--mtbf"]) if "--mtbf" in own else None,
            scaling.seconds("--restart", own.get("--restart", "60s")),
            scaling.replicas(own.get("--replicas", "1:4096")),
        )


def own_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(values of the options that are a plan's own, the words without them). Raises: ConfigError."""
    own: dict[str, str] = {}
    rest, words = [], list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name not in _OWN:
            rest.append(name + equals + value)
        elif equals or words:
            own[name] = value if equals else words.pop(0)
        else:
            raise ConfigError(f"{name}: expected a value. HINT: {name} {_OWN[name]}")
    return own, rest


def _gigabytes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"{_GB} {text!r}: expected the memory of a device in GB. HINT: {_GB} 16")
    return found


Sent = dict[str, list[scaling.Exchange]]


def _scaled(state: Any, plan: Any, program: Any, compiled: Any, batch: Any) -> tuple[scaling.Work, Sent]:
    """The measured work for the extrapolation, from about a second of steps; their state is dropped."""
    import jax

    held = state_bytes(state)
    params = jax.eval_shape(program.fns.init, jax.random.key(0), plan.inputs)[0]
    compute_s = _step_s(compiled, state, batch)
    shape, epoch = plan.settings.step.batch, plan.settings.reading.epoch
    work = scaling.Work(
        compute_s,
        None if epoch is None else epoch.num_samples,
        shape.batch_size * shape.accumulation,
        sum(held.values()),
    )
    return work, scaling.exchanges(params)


def _scaling_lines(work: scaling.Work, sent: Sent, wish: Wish, num_replicas: int) -> list[str]:
    assert wish.wire is not None
    lines = [*scaling.curve(work, sent, wish.wire, wish.replicas), *scaling.error_lines()]
    if num_replicas > 1:
        lines.append(f"measured with {num_replicas} replicas here: the time includes their exchange.")
    if wish.mtbf_s is not None:
        lines += scaling.failures(work, wish.mtbf_s, wish.restart_s, wish.replicas)
    return lines


def _scaling_facts(work: scaling.Work, sent: Sent, wish: Wish) -> dict[str, Any]:
    assert wish.wire is not None
    facts: dict[str, Any] = {
        "compute_s": work.compute_s,
        "wire": wish.wire._asdict(),
        "step_s": scaling.steps_s(work, sent, wish.wire, wish.replicas),
        "model_error": scaling.error_facts(),
    }
    if wish.mtbf_s is not None:
        rows = scaling.saves(work, wish.mtbf_s, wish.restart_s, wish.replicas)
        facts["failures"] = [row._asdict() for row in rows]
    return facts


def _step_s(compiled: Any, state: Any, batch: Any) -> float:
    """The median of some steps; as many on every rank."""
    import jax

    took = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        state, sums = compiled(state, batch)
        jax.block_until_ready((state, sums))
        took.append(time.perf_counter() - began)
    return statistics.median(took[_WARM:])


def _by_replicas(plan: Any, batch: Any, device_gb: float) -> list[str]:
    import jax

    from cyxjax.train.start.memory_plan import held_by, table

    devices = jax.devices()
    if len(devices) < 4 or len(devices) != jax.local_device_count():
        return [f"memory at other numbers of replicas is read from two programs. HINT: {_ON_CPU}"]
    return table(list(held_by(plan, devices, batch)), device_gb * 1e9)
