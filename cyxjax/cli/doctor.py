"""`cyxjax doctor`: checks this machine, or under a launcher the group, before a training run."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from cyxjax.cli.machine_checks import Check, machine_checks, threads
from cyxjax.command import Parser, quiet_output
from cyxjax.errors import EXIT_OK, EXIT_USER_ERROR
from cyxjax.launch import environment
from cyxjax.launch.clusters import discover


def main(argv: Sequence[str]) -> int:
    """Prints the checks as they are made; exit code 1 if one failed."""
    given, words = _parser().parse_known_args(argv)
    place = discover(environment.here())
    if place.world_size == 1:
        _parser().parse_args(argv)
        checks = machine_checks(environment.here(), Path.cwd())
    else:
        from cyxjax.cli.group_doctor import group_checks

        checks = chain(group_checks(words, Path.cwd()), [threads()])
    shown: list[Check] = []
    failed = False
    with quiet_output() if given.json else nullcontext():
        for check in checks:
            failed |= check.level == "FAIL"
            # Rank 0 prints for the group; if no group forms, each rank prints what it found.
            if place.is_master or (check.topic, check.level) == ("group", "FAIL"):
                shown.append(check)
                if not given.json:
                    print(check.line(), flush=True)
    if given.json and shown:
        print(json.dumps({"good": not failed, "checks": [asdict(check) for check in shown]}), flush=True)
    return EXIT_USER_ERROR if failed else EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax doctor",
        description="Checks versions, devices, threads, ports and disk of this machine. Under a launcher it "
        "checks the group: hosts, names, ports, clocks, versions, devices, memory, disk, the run folder "
        "and all-reduces; with --config FILE (and keys, as in train) also configuration and data.",
        epilog="example: cd /where/runs/go && cyxjax doctor    "
        "(of a group: cyxjax launch --nproc-per-node 2 -m cyxjax.cli doctor)",
    )
    parser.add_argument("--json", action="store_true", help="print all checks as one JSON object, at the end")
    return parser
