"""`cyxjax manifest slurm|k8s [flags] -- program ...`: writes a job file; for Slurm also submits it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, EXIT_OK, ConfigError, CyxjaxError
from cyxjax.launch.manifests import JobSpec, kubernetes_manifest, slurm_script, submit_slurm

USAGE = "cyxjax manifest (slurm | k8s) [flags] -- program [its arguments ...]"
_HELP = {
    "name": "name of the job",
    "nodes": "number of hosts",
    "processes_per_node": "ranks on each host",
    "gpus_per_node": "NVIDIA GPUs on each host; 0 for the CPU",
    "cpus_per_process": "CPU cores for each rank",
    "memory_gib": "memory of each host, in GiB",
    "time": "Slurm: time limit, [days-]hours:minutes:seconds",
    "partition": "Slurm: partition",
    "image": "Kubernetes: container image with cyxjax and jax",
    "namespace": "Kubernetes: namespace",
    "max_restarts": "how often the group may be started again",
    "port": "port of the meeting place",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (from the command line). HINT: {USAGE}; see --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the program's); returns its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except CyxjaxError as error:
        print(f"cyxjax manifest: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_INFRASTRUCTURE


def _run(argv: list[str]) -> int:
    ours, program = _split(argv)
    given = _build_parser().parse_args(ours)
    spec = JobSpec(program, **{name: getattr(given, name) for name in _HELP})
    if (given.check or given.submit) and given.engine != "slurm":
        raise ConfigError(
            "--check and --submit are for slurm. HINT: pipe a k8s manifest to `kubectl apply -f -`."
        )
    text = slurm_script(spec) if given.engine == "slurm" else kubernetes_manifest(spec)
    path = given.output or (f"{spec.name}.sbatch" if given.check or given.submit else "")
    if not path:
        print(text, end="")
        return EXIT_OK
    Path(path).write_text(text)
    print(f"wrote {path}")
    if given.check or given.submit:
        print(submit_slurm(path, check_only=True))
    if given.submit:
        print(submit_slurm(path))
    return EXIT_OK


def _build_parser() -> _Parser:
    parser = _Parser(prog="cyxjax manifest", usage=USAGE, allow_abbrev=False, description=__doc__)
    parser.add_argument("engine", choices=["slurm", "k8s"])
    parser.add_argument("--output", default="", help="file to write; standard output if left out")
    parser.add_argument("--check", action="store_true", help="Slurm: ask sbatch whether it would take it")
    parser.add_argument("--submit", action="store_true", help="Slurm: check, then submit")
    for field in fields(JobSpec):
        if field.name in _HELP:
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(field.default), default=field.default, help=_HELP[field.name])
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """(our flags, the program): what follows `--` is the program's."""
    if "--" not in argv:
        return argv, [] if {"-h", "--help"} & set(argv) else _no_program()
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _no_program() -> NoReturn:
    raise ConfigError(f"no program to run. HINT: {USAGE}.")


if __name__ == "__main__":
    sys.exit(main())
