"""`cyxjax env`: the rank, world size and address that this process would use, and their source."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cyxjax.cli.machine_checks import devices
from cyxjax.command import Parser
from cyxjax.errors import CyxjaxError
from cyxjax.launch import environment
from cyxjax.launch.backend import pages
from cyxjax.launch.clusters import claims
from cyxjax.launch.program import machine, provenance, software
from cyxjax.launch.topology import Topology
from cyxjax.redaction import is_secret_name, redact

_TELLING = (
    "CYXJAX_",
    "JAX_",
    "XLA_",
    "NCCL_",
    "CUDA_VISIBLE",
    "DISTRIBUTED_",
    "SLURM_",
    "OMPI_",
    "NPROC",
    "OMP_",
)


def main(argv: Sequence[str]) -> int:
    """Prints the place found in the environment; exit code 0. Raises: ConfigError for a bad environment."""
    given = _parser().parse_args(argv)
    env = environment.here()
    if given.json:
        print(json.dumps(for_bug_report(env), indent=1))
    else:
        print("\n".join(describe_place(env)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax env",
        description="Shows the rank, world size, address and backend that were found, and their source.",
        epilog="example: cyxjax env --json > env.json    (for a bug report)",
    )
    parser.add_argument("--json", action="store_true", help="print what a bug report needs, as JSON")
    return parser


def for_bug_report(env: Mapping[str, str]) -> dict[str, Any]:
    """The place and its source, software, machine, devices, variables, and the state of the code."""
    first = claims(env)[0]
    set_here = {name: env[name] for name in sorted(env) if name.startswith(_TELLING) or name in first.names}
    return {
        "place": describe_place(env),
        "software": software(),
        "machine": machine(),
        "devices": devices().found,
        "variables": {n: "[redacted]" if is_secret_name(n) else redact(v) for n, v in set_here.items()},
        "code": provenance().get("git commit", "no git repository here"),
    }


def describe_place(env: Mapping[str, str]) -> list[str]:
    """Lines to print: the place, its source, the backend, and other sources that claim a place."""
    first, *others = claims(env)
    gpus = environment.visible_gpus(env)
    try:
        wires = environment.settle(first, env)
        notes = environment.advice(wires, first)
    except CyxjaxError as err:  # the error that a start would raise
        wires, notes = "none", [str(err)]
    lines = [
        f"source      {_source(first, env)}",
        f"rank        {first.rank} of {first.world_size} (local rank {first.local_rank})",
        f"meets at    {first.address}, waits {first.timeout_ms / 1000:g} s",
        f"backend     {wires} (asked for: {first.backend}; visible GPUs: {len(gpus)})",
    ]
    lines += [f"pages       {pages.described(env, first.local_world_size)}"]
    lines += [f"also says   {_source(other, env)}: the same place" for other in others]
    lines += [f"note        {text}" for text in notes]
    return lines


def _source(topology: Topology, env: Mapping[str, str]) -> str:
    given = ", ".join(f"{name}={env[name]}" for name in topology.names if name in env)
    return f"{topology.source} ({given})" if given else topology.source
