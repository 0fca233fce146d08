"""The launcher's command line: torchrun's flags in both spellings, and `--gpus N --script`."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cyxjax.command import Parser, number
from cyxjax.errors import ConfigError, nearest
from cyxjax.launch.backend import pages
from cyxjax.launch.environment import visible_gpus
from cyxjax.launch.heartbeat import Limits
from cyxjax.launch.local_ranks import LocalRanks, elastic_hosts, find_place
from cyxjax.launch.topology import whole

MAX_HERE = 4_096  # processes on one host: as many as the largest machines have hardware threads

USAGE = "python -m cyxjax.launch [flags] (script.py | -m module | --no-python program) [its arguments ...]"


@dataclass(frozen=True)
class Options:
    """What to start and how to watch it.

    only_files, shown: local ranks whose output goes to their log only, and those not filtered out.
    hosts: (fewest, most) of a job whose hosts come and go; None for a fixed number.
    grace_s: between SIGTERM and SIGKILL. limits: how long a rank may make no progress.
    pages: of memory, one of `pages.WORDS`.
    """

    place: LocalRanks
    command: list[str]
    max_restarts: int = 0
    log_dir: str | None = None
    only_files: frozenset[int] = frozenset()
    shown: frozenset[int] = field(default_factory=frozenset)
    grace_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    pages: str = pages.AUTO
    hosts: tuple[int, int] | None = None


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """The options in `argv` (without the program's name). Raises: ConfigError; SystemExit(0) for --help."""
    parser = _build_parser()
    flags, rest = _split(parser, list(argv))
    given, unknown = parser.parse_known_args(flags)
    if unknown:
        hint = nearest(unknown[0], [flag for action in parser._actions for flag in action.option_strings])
        raise ConfigError(f"the launcher has no flag {unknown[0]!r}. HINT: {hint}")
    if given.gpus is not None:
        given.nproc_per_node = given.gpus
    nproc = _count(given.nproc_per_node, env)
    place = find_place(given, nproc, env)
    return Options(
        place=place,
        command=_command(given, rest),
        max_restarts=given.max_restarts,
        log_dir=given.log_dir,
        only_files=_only_files(given, nproc),
        shown=_ranks(given.local_ranks_filter, nproc),
        grace_s=given.grace,
        limits=Limits.parse(given.hang_timeout),
        pages=given.pages,
        hosts=elastic_hosts(given.nnodes),
    )


def _build_parser() -> Parser:
    parser = Parser(
        prog="cyxjax launch",
        usage=USAGE,
        allow_abbrev=False,
        description=__doc__,
        example="cyxjax launch --nproc-per-node 2 -m cyxjax.train --config configs/digits.yaml",
    )
    add = parser.add_argument
    add("--nproc-per-node", default="1", help="processes on this host: a number, auto, gpu or cpu")
    add("--gpus", default=None, help="the same as --nproc-per-node")
    add("--script", default=None, help="the script, for the spelling --gpus N --script train.py")
    add("--nnodes", default=None, help="number of hosts, or MIN:MAX for hosts that come and go")
    add("--node-rank", default=None, help="this host's number, from 0")
    add("--master-addr", default=None, help="an address of host 0")
    add("--master-port", default=None, help="port of the group's server; a free one on a single host")
    add("--rdzv-endpoint", default=None, help="HOST:PORT, for --master-addr and --master-port")
    add("--rdzv-id", "--run-id", dest="rdzv_id", default=None, help="name of the job")
    add("--rdzv-backend", default=None, choices=["static", "c10d"], help="accepted, one way for both")
    add("--standalone", action="store_true", help="one host, on loopback, on a free port")
    add(
        "--max-restarts",
        type=number(0, 1_000_000),
        default=0,
        help="how often the group may be started again",
    )
    add("--monitor-interval", default=None, help="accepted; ends are noticed at once here")
    add("--log-dir", default=None, help="folder for a log per rank and first_error.json")
    add("-r", "--redirects", default="0", help="3 (or RANK:3,...): output to log files only")
    add("-t", "--tee", default="0", help="3 (or RANK:3,...): output to log files and here")
    add("--local-ranks-filter", default="", help="show the output of these local ranks only, e.g. 0,1")
    add("--grace", type=number(0, 86_400, float), default=30.0, help="seconds between SIGTERM and SIGKILL")
    add("--hang-timeout", default="auto", help="seconds without progress; 0 off; 60,compile=900 by phase")
    add("--pages", default=pages.AUTO, choices=pages.WORDS, help="memory pages of ranks on CPUs")
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add("--no-python", action="store_true", help="run a program that is no Python script")
    return parser


def _split(parser: Parser, argv: list[str]) -> tuple[list[str], list[str]]:
    """(our flags with dashes, the program and its arguments): ours end at the first word that is no flag."""
    takes_value = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    flags: list[str] = []
    while argv and argv[0].startswith("-"):
        word = argv.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        flags.append(name + equals + value)
        if not equals and takes_value.get(name) and argv:
            flags.append(argv.pop(0))
    return flags, argv


def _command(given: argparse.Namespace, rest: list[str]) -> list[str]:
    if given.script is not None:
        rest = [given.script, *rest]
    if not rest:
        raise ConfigError(f"no program to start. HINT: {USAGE}")
    if given.no_python:
        return rest
    if given.module:
        return [sys.executable, "-u", "-m", *rest]
    if not os.path.isfile(rest[0]):
        raise ConfigError(
            f"script {rest[0]!r} does not exist in {os.getcwd()}. "
            "HINT: give a path to a .py file, `-m` for a module, `--no-python` for another program."
        )
    return [sys.executable, "-u", *rest]


def _count(text: str, env: Mapping[str, str]) -> int:
    gpus = len(visible_gpus(env))
    if text == "gpu" and not gpus:
        raise ConfigError(
            "--nproc-per-node=gpu, but this host shows no NVIDIA GPU. HINT: use a number or `cpu`."
        )
    if text in ("gpu", "auto", "cpu"):
        return gpus if gpus and text != "cpu" else os.cpu_count() or 1
    return whole("--nproc-per-node", text, 1, MAX_HERE)


def _only_files(given: argparse.Namespace, nproc: int) -> frozenset[int]:
    """Local ranks whose output goes to files only. --tee and --redirects need a folder to write to."""
    redirected = _std(given.redirects, "--redirects", nproc)
    teed = _std(given.tee, "--tee", nproc)
    if (redirected or teed) and given.log_dir is None:
        raise ConfigError("--tee and --redirects write files. HINT: say where with --log-dir FOLDER.")
    return frozenset(redirected - teed)


def _std(text: str, flag: str, nproc: int) -> set[int]:
    """Local ranks that torch's value names: '3' for all, '0:3,1:0' by rank (1 out, 2 err, 3 both, 0 none)."""
    chosen: set[int] = set()
    for part in text.split(","):
        rank, colon, value = part.rpartition(":")
        if value not in ("0", "1", "2", "3") or (colon and not rank.isdecimal()):
            raise ConfigError(f"{flag}={text!r}; expected 0-3, or RANK:0-3 joined by commas. HINT: use 3.")
        if value != "0":
            chosen |= {int(rank)} if colon else set(range(nproc))
    return chosen


def _ranks(text: str, nproc: int) -> frozenset[int]:
    if not text:
        return frozenset(range(nproc))
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ConfigError(f"--local-ranks-filter={text!r}; expected numbers joined by commas. HINT: use 0,1.")
    return frozenset(int(part) for part in text.split(","))
