"""The launcher's command line: torchrun's flags in both spellings, and `--gpus N --script`."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cyxjax.command import Parser, number
from cyxjax.errors import ConfigError
from cyxjax.launch.backend import pages
from cyxjax.launch.environment import thread_share, visible_gpus
from cyxjax.launch.heartbeat import Limits
from cyxjax.launch.local_ranks import LocalRanks, find_place
from cyxjax.launch.topology import MAX_WORLD_SIZE, PORTS

MAX_HERE = 4_096  # processes on one host: as many as the largest machines have hardware threads
EVERY_RANK = frozenset(range(MAX_HERE))

USAGE = "python -m cyxjax.launch [flags] (script.py | -m module | --no-python program) [its arguments ...]"


@dataclass(frozen=True)
class Options:
    """What to start and how to watch it.

    shown: local ranks whose output is shown here; that of all is in `log_dir`.
    hosts: (fewest, most) of a job whose hosts join and leave; None for a fixed number.
    grace_s: between SIGTERM and SIGKILL. limits: how long a rank may make no progress.
    pages: of memory, one of `pages.WORDS`.
    """

    place: LocalRanks
    command: list[str]
    max_restarts: int = 0
    log_dir: str | None = None
    shown: frozenset[int] = EVERY_RANK
    grace_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    pages: str = pages.AUTO
    hosts: tuple[int, int] | None = None


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """The options in `argv` (without the program's name). Raises: ConfigError; SystemExit(0) for --help."""
    given = _build_parser().parse_args(argv)
    nproc = _count(given.nproc_per_node, env)
    in_files = given.redirects - given.tee if given.log_dir else frozenset()
    return Options(
        place=find_place(given, nproc, env),
        command=_command(given),
        max_restarts=given.max_restarts,
        log_dir=given.log_dir,
        shown=given.local_ranks_filter - in_files,
        grace_s=given.grace,
        limits=Limits.parse(given.hang_timeout),
        pages=given.pages,
        hosts=None if given.nnodes is None or given.nnodes[0] == given.nnodes[1] else given.nnodes,
    )


def _build_parser() -> Parser:
    parser = Parser(
        prog="cyxjax launch",
        usage=USAGE,
        allow_abbrev=False,
        description=__doc__,
        epilog="example: cyxjax launch --nproc-per-node 2 -m cyxjax.train --config configs/digits.yaml",
    )
    add, any_number = parser.add_argument, number(0, 1_000_000)
    add(
        "--nproc-per-node",
        "--gpus",
        type=processes,
        default="1",
        help="processes on this host: a number, auto, gpu or cpu",
    )
    add("--script", help="the script, for the spelling --gpus N --script train.py")
    add("--nnodes", type=hosts, help="number of hosts, or MIN:MAX for hosts that join and leave")
    add("--node-rank", type=any_number, help="this host's number, from 0")
    add("--master-addr", help="an address of host 0")
    add("--master-port", type=number(*PORTS), help="port of the group's server; on one host, a free one")
    add("--rdzv-endpoint", help="HOST:PORT, in place of --master-addr and --master-port")
    add("--rdzv-id", "--run-id", help="name of the job")
    add("--rdzv-backend", choices=["static", "c10d"], help="accepted; both work the same")
    add("--standalone", action="store_true", help="one host, on loopback, on a free port")
    add("--max-restarts", type=any_number, default=0, help="how often the group may be restarted")
    add("--monitor-interval", help="accepted; ends are noticed immediately")
    add("--log-dir", help="folder for a log per rank and first_error.json")
    add("-r", "--redirects", type=streams, default="0", help="3 (or RANK:3,...): output to --log-dir only")
    add("-t", "--tee", type=streams, default="0", help="3 (or RANK:3,...): output to --log-dir and here")
    add(
        "--local-ranks-filter",
        type=ranks,
        default=EVERY_RANK,
        help="show the output of these local ranks only, e.g. 0,1",
    )
    add("--grace", type=number(0, 86_400, float), default=30.0, help="seconds between SIGTERM and SIGKILL")
    add("--hang-timeout", default="auto", help="seconds without progress; 0 off; 60,compile=900 by phase")
    add("--pages", default=pages.AUTO, choices=pages.WORDS, help="memory pages of ranks on CPUs")
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add("--no-python", action="store_true", help="run a program that is not a Python script")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    flags = parser._option_string_actions
    flags |= {f"--{flag[2:].replace('-', '_')}": flags[flag] for flag in flags if flag.startswith("--")}
    return parser


def hosts(text: str) -> tuple[int, int]:
    """(fewest, most) of `MIN:MAX`; for a single number both are equal."""
    low, _, high = text.partition(":")
    fewest = number(1, MAX_WORLD_SIZE)(low)
    return fewest, number(fewest, MAX_WORLD_SIZE)(high or low)


def processes(text: str) -> int | str:
    """A number of processes, or the word gpu, auto or cpu."""
    return text if text in ("gpu", "auto", "cpu") else int(number(1, MAX_HERE)(text))


def streams(text: str) -> frozenset[int]:
    """Local ranks that torch's value names: '3' for all, '0:3,1:0' by rank (1 out, 2 err, 3 both, 0 none)."""
    chosen = [part.rpartition(":") for part in text.split(",")]
    by_rank = [ranks(rank) if rank else EVERY_RANK for rank, _, value in chosen if int(value)]
    return frozenset().union(*by_rank)


def ranks(text: str) -> frozenset[int]:
    return frozenset(map(int, text.split(",")))


def _command(given: argparse.Namespace) -> list[str]:
    words = [given.script] * (given.script is not None) + given.program[given.program[:1] == ["--"] :]
    if not words:
        raise ConfigError(f"no program to start. HINT: {USAGE}")
    if given.no_python:
        return words
    if given.module:
        return [sys.executable, "-u", "-m", *words]
    if not os.path.isfile(words[0]):
        raise ConfigError(
            f"script {words[0]!r} does not exist in {os.getcwd()}. "
            "HINT: give a path to a .py file, `-m` for a module, `--no-python` for another program."
        )
    return [sys.executable, "-u", *words]


def _count(processes: int | str, env: Mapping[str, str]) -> int:
    if isinstance(processes, int):
        return processes
    gpus = len(visible_gpus(env))
    if processes == "gpu" and not gpus:
        raise ConfigError(
            "--nproc-per-node=gpu, but this host shows no NVIDIA GPU. HINT: use a number or `cpu`."
        )
    return gpus if gpus and processes != "cpu" else thread_share(1)
