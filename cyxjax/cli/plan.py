"""`cyxjax plan --config X`: compiles one step of an experiment and shows what it costs; trains nothing."""

import argparse
import json
import shutil
import statistics
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter

from cyxjax.command import Parser, number
from cyxjax.config.help import Command
from cyxjax.config.load import load_config
from cyxjax.config.values import Seconds
from cyxjax.errors import EXIT_OK, ConfigError
from cyxjax.launch.environment import here
from cyxjax.observe import scaling
from cyxjax.observe.compiled_plan import bytes_per_step, collectives, memory_bytes, plan_lines, state_bytes

_BYTES_PER_S, _LATENCY_S = 1.25e9, 20e-6  # of the network, if other options ask for a prediction
_RESTART_S = 60.0
_STEPS, _WARM = 13, 3
_ON_CPU = "plan in one process, with `--cpu-devices 4` if it has fewer devices"
_COMMAND = Command(
    "cyxjax plan",
    "Compiles one step of an experiment and shows what it sends, holds and computes. Writes nothing. "
    "--device-gb N: what a replica would hold at 1 to 4,096 replicas under mean, zero1 and fsdp, and the "
    "cheapest that fits N GB. --bandwidth 100Gbit, --latency 5us, --replicas 1:4096 (any of them): runs some "
    "steps here and predicts the time of a step and an epoch for other numbers of replicas, by strategy. "
    "--mtbf 1000h (of a host), --restart 60s: how often to save, and the expected goodput. "
    "--json: everything except --device-gb as one JSON object.",
    "cyxjax plan --config configs/digits.yaml --bandwidth 10Gbit --latency 20us --mtbf 1000h",
)


def main(argv: Sequence[str]) -> int:
    """Prints what a step sends and holds, for the arguments of `cyxjax.train`; writes nothing."""
    given, words = own_options(argv)
    config = load_config(words, _COMMAND, here())
    if config.reproducibility == "exact":
        raise ConfigError(
            "a plan describes one program, but a step with reproducibility='exact' runs several. "
            "HINT: plan with --reproducibility none; exact sends about as much."
        )
    from cyxjax.distributed import process_group
    from cyxjax.train.experiment import prepare
    from cyxjax.train.feeding.placing import NO_SIGNAL
    from cyxjax.train.hooks.hook import Position

    _, _, trainer, plan = prepare(config)
    batch = next(iter(plan.feed.train(Position(), lambda: NO_SIGNAL, 1))).batch
    step: Any = trainer.program.train_step
    state = trainer.state
    lowered = step.lower(state, batch)
    compiled = lowered.compile()
    # before the steps, which consume the state
    found, held, memory = collectives(compiled.as_text()), state_bytes(state), memory_bytes(compiled)
    cost = lowered.cost_analysis() or {}
    # on every rank: the steps are real
    drawn_out = given.wire and _scaled(state, sum(held.values()), plan, trainer.program, compiled, batch)
    if trainer.is_master() and given.json:
        facts = {
            "sent_bytes_per_replica": bytes_per_step(found),
            "collectives": [asdict(one) for one in found],
            "state_bytes": held,
            "program_bytes": memory,
            "flops_per_replica": cost.get("flops"),
            "comm": config.comm,
            "precision": config.precision,
        }
        print(json.dumps(facts | (_scaling_facts(*drawn_out, given) if drawn_out else {})))
    elif trainer.is_master():
        offload = f", offload: {config.offload}" if config.offload != "none" else ""
        how = f"comm: {config.comm}, precision: {config.precision}, remat: {config.remat}{offload}"
        work = f"computed in a step: {work_line(cost)}"
        _show([how, *plan_lines(found, held, memory), work])
        if given.device_gb is not None:
            _show(_by_replicas(plan, batch, given.device_gb))
        if drawn_out:
            _show(_scaling_lines(*drawn_out, given, plan.settings.step.batch.num_shares))
    process_group.finalize()
    return EXIT_OK


def _show(lines: Iterable[str]) -> None:
    """Prints `lines` in the columns of the terminal, at most 80."""
    width = min(80, shutil.get_terminal_size().columns)
    for line in lines:
        print(textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False))


def work_line(cost: Mapping[str, float]) -> str:
    """FLOPs of a step, counted before compilation: the calls of libraries do not show theirs."""
    flops = cost.get("flops", 0.0)
    return f"{flops / 1e9:,.3f} GFLOP per replica" if flops > 0 else "unknown on this backend"


def own_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of `plan` itself, and the words without them. Raises: ConfigError."""
    parser = Parser(prog=_COMMAND.prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device-gb", type=number(1e-6, 1e6, float))
    parser.add_argument("--bandwidth", type=rate)
    parser.add_argument("--latency", type=time_span)
    parser.add_argument("--mtbf", type=time_span)
    parser.add_argument("--restart", type=time_span)
    parser.add_argument("--replicas", type=replica_counts)
    given, words = parser.parse_known_args(argv)
    asked = (given.bandwidth, given.latency, given.mtbf, given.restart, given.replicas)
    wire = scaling.Wire(given.bandwidth or _BYTES_PER_S, given.latency or _LATENCY_S)
    given.wire = wire if any(value is not None for value in asked) else None
    given.replicas, given.restart = given.replicas or scaling.COUNTS, given.restart or _RESTART_S
    return given, words


def rate(text: str) -> int:
    """Bytes per second of `100Gbit`, `12.5GB`."""
    return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text)


def time_span(text: str) -> float:
    """Seconds of `5us`, `30s`, `1000h`."""
    return TypeAdapter(Annotated[Seconds, Field(gt=0)]).validate_python(text)


def replica_counts(text: str) -> tuple[int, ...]:
    """The powers of two in a range such as `1:4096`, and both ends."""
    first, _, last = text.partition(":")
    low = number(1, 1_000_000)(first)
    high = number(low, 1_000_000)(last)
    powers = {1 << n for n in range(20) if low <= 1 << n <= high}
    return tuple(sorted(powers | {low, high}))


Sent = dict[str, list[scaling.Exchange]]


def _scaled(
    state: Any, num_bytes: int, plan: Any, program: Any, compiled: Any, batch: Any
) -> tuple[scaling.Work, Sent]:
    """The measured work for the extrapolation, from about a second of steps; their state is dropped.

    num_bytes: of the state on one device.
    """
    import jax

    params = jax.eval_shape(program.fns.init, jax.random.key(0), plan.inputs)[0]
    compute_s = _step_s(compiled, state, batch)
    shape, epoch = plan.settings.step.batch, plan.settings.reading.epoch
    work = scaling.Work(
        compute_s,
        None if epoch is None else epoch.num_samples,
        shape.batch_size * shape.accumulation,
        num_bytes,
    )
    return work, scaling.exchanges(params)


def _scaling_lines(work: scaling.Work, sent: Sent, given: argparse.Namespace, num_replicas: int) -> list[str]:
    lines = [
        *scaling.curve(work, sent, given.wire, given.replicas),
        "(predicted; processes that share the cores of a host need several times as long)",
    ]
    if num_replicas > 1:
        lines.append(f"measured with {num_replicas} replicas here: the time includes their exchange.")
    if given.mtbf is not None:
        lines += scaling.failures(work, given.mtbf, given.restart, given.replicas)
    return lines


def _scaling_facts(work: scaling.Work, sent: Sent, given: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "compute_s": work.compute_s,
        "wire": given.wire._asdict(),
        "step_s": scaling.steps_s(work, sent, given.wire, given.replicas),
    }
    if given.mtbf is not None:
        rows = scaling.saves(work, given.mtbf, given.restart, given.replicas)
        facts["failures"] = [row._asdict() for row in rows]
    return facts


def _step_s(compiled: Any, state: Any, batch: Any) -> float:
    """The median time of some steps; their number is the same on every rank."""
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
        return [f"memory for other numbers of replicas is computed from two programs. HINT: {_ON_CPU}"]
    return table(list(held_by(plan, devices, batch)), device_gb * 1e9)
