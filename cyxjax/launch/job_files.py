"""Job files for the engines: an sbatch script for Slurm, an indexed Job with its Service for Kubernetes.

Both are complete and self-explaining text. Values are checked by the engine, not here.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cyxjax.command import Parser
from cyxjax.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_OK,
    ConfigError,
    CyxjaxError,
    GroupError,
    known,
)
from cyxjax.files import write_whole
from cyxjax.launch.topology import DEFAULT_PORT

SAVE_S = 120  # between the engine's request to stop and its kill


@dataclass(frozen=True)
class JobSpec:
    """What to run where. `command` is the program with its arguments, e.g. ["python", "-m", "cyxjax.train"].

    gpus_per_node 0 trains on the CPU, with `processes_per_node` processes; with GPUs one process per GPU is
    the usual choice. time is Slurm's, e.g. "01:00:00"; image is Kubernetes' container image.
    """

    command: Sequence[str]
    name: str = "cyxjax"
    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_process: int = 1
    memory_gib: int = 8
    time: str = "01:00:00"
    partition: str = ""
    image: str = ""
    namespace: str = "default"
    max_restarts: int = 3
    port: int = DEFAULT_PORT


def slurm_script(spec: JobSpec) -> str:
    """The text of an sbatch script: one launcher per node, which starts that node's processes."""
    wanted = {
        "job-name": spec.name,
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": spec.cpus_per_process * spec.processes_per_node,
        "mem": f"{spec.memory_gib}G",
        "time": spec.time,
        "partition": spec.partition,
        "gpus-per-node": spec.gpus_per_node or "",
        "output": "%x-%j.log",
        "signal": f"TERM@{SAVE_S}",
    }
    world_size = spec.nodes * spec.processes_per_node
    directives = "\n".join(f"#SBATCH --{name}={value}" for name, value in wanted.items() if value != "")
    return f"""#!/bin/bash
# {spec.nodes} node(s) with {spec.processes_per_node} process(es) each: {world_size} ranks.
# Submit: sbatch {spec.name}.sbatch      Check only: sbatch --test-only {spec.name}.sbatch
{directives}
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
# One launcher per node; it finds the nodes, its own number and the meeting place from Slurm's variables.
# One that fails ends the others, which still report how they ended: srun must not kill them.
srun --kill-on-bad-exit=0 --wait={SAVE_S} \\
    {_launcher(spec)} \\
    {shlex.join(spec.command)}
"""


def submit_slurm(path: str, *, check_only: bool = False) -> str:
    """The output of sbatch for the script at `path`; with check_only nothing is queued.

    Raises: GroupError when Slurm refuses the script; FileNotFoundError where it is not installed.
    """
    command = ["sbatch", *(["--test-only"] if check_only else []), path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise GroupError(
            f"sbatch refused {path}: {answer}. HINT: compare with `sinfo`; the script is plain text."
        )
    return answer


def kubernetes_manifest(spec: JobSpec) -> str:
    """A List of a headless Service and an indexed Job, as JSON, which kubectl reads as it reads YAML.

    Every pod is one node: its index is the node's number, and its launcher starts the node's processes.
    Raises: ConfigError without an image.
    """
    if not spec.image:
        raise ConfigError("no container image. HINT: give --image one built from .github/Dockerfile.")
    listing = {"apiVersion": "v1", "kind": "List", "items": [_service(spec), _job(spec)]}
    return json.dumps(listing, indent=2) + "\n"


def _service(spec: JobSpec) -> dict[str, Any]:
    """Gives every pod a name; also before it is ready, since the ranks meet to become ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": spec.name, "namespace": spec.namespace},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": spec.name},
            "ports": [{"name": "meeting", "port": spec.port}],
        },
    }


def _job(spec: JobSpec) -> dict[str, Any]:
    pod = {
        "subdomain": spec.name,
        "restartPolicy": "Never",
        "shareProcessNamespace": True,  # then not the launcher but pause is process 1, which reaps orphans
        "terminationGracePeriodSeconds": SAVE_S,
        "containers": [_container(spec)],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": spec.name, "namespace": spec.namespace},
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "backoffLimit": spec.max_restarts * spec.nodes,
            "template": {"metadata": {"labels": {"app": spec.name}}, "spec": pod},
        },
    }


def _container(spec: JobSpec) -> dict[str, Any]:
    processes = spec.processes_per_node
    resources: dict[str, Any] = {
        "cpu": str(spec.cpus_per_process * processes),
        "memory": f"{spec.memory_gib}Gi",
    }
    if spec.gpus_per_node:
        resources["nvidia.com/gpu"] = spec.gpus_per_node
    return {
        "name": "train",
        "image": spec.image,
        "command": [*shlex.split(_launcher(spec)), *spec.command],
        "env": [{"name": name, "value": value} for name, value in kubernetes_environment(spec).items()],
        "resources": {"requests": resources, "limits": resources},
        "ports": [{"containerPort": spec.port}],
    }


def kubernetes_environment(spec: JobSpec) -> dict[str, str]:
    """What the manifest sets in every pod; Kubernetes adds JOB_COMPLETION_INDEX. WORLD_SIZE counts pods."""
    return {
        "WORLD_SIZE": str(spec.nodes),
        "MASTER_ADDR": f"{spec.name}-0.{spec.name}" if spec.nodes > 1 else "127.0.0.1",
        "MASTER_PORT": str(spec.port),
        "CYXJAX_RUN_ID": spec.name,
        "DISTRIBUTED_TIMEOUT_MS": "300000",  # pods start when there is room for them
    }


def _launcher(spec: JobSpec) -> str:
    restarts = f" --max-restarts {spec.max_restarts}" if spec.max_restarts else ""
    flags = f"--nproc-per-node {spec.processes_per_node}{restarts} --grace {SAVE_S - 10}"  # 10 s to report
    return f"python -m cyxjax.launch {flags} --no-python"


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
    "image": "Kubernetes: container image with cyxjax and jax, such as one of .github/Dockerfile",
    "namespace": "Kubernetes: namespace",
    "max_restarts": "how often the group may be restarted",
    "port": "Kubernetes: port of the group's server",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the program's); returns its exit code."""
    try:
        _run(list(sys.argv[1:] if argv is None else argv))
    except (CyxjaxError, OSError) as raised:
        error = raised if isinstance(raised, CyxjaxError) else known(raised, system=True)
        print(f"cyxjax manifest: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_INFRASTRUCTURE
    return EXIT_OK


def _run(argv: list[str]) -> None:
    parser, end = _build_parser(), argv.index("--") if "--" in argv else len(argv)
    given, program = parser.parse_args(argv[:end]), argv[end + 1 :]
    if not program:
        parser.error("no program to run")
    if given.engine == "k8s" and (given.check or given.submit):
        parser.error("--check and --submit are for Slurm; use --output FILE and `kubectl apply -f FILE`")
    spec = JobSpec(program, **{name: getattr(given, name) for name in _HELP})
    text = slurm_script(spec) if given.engine == "slurm" else kubernetes_manifest(spec)
    path = given.output or (f"{spec.name}.sbatch" if given.check or given.submit else "")
    if not path:
        print(text, end="")
        return
    write_whole(path, text)
    print(f"wrote {path}")
    if given.check or given.submit:
        print(submit_slurm(path, check_only=True))
    if given.submit:
        print(submit_slurm(path))


def _build_parser() -> Parser:
    parser = Parser(
        prog="cyxjax manifest",
        usage=USAGE,
        allow_abbrev=False,
        description=__doc__,
        epilog="example: cyxjax manifest slurm --output digits.sbatch -- python scripts/train_minimal.py",
    )
    parser.add_argument("engine", choices=["slurm", "k8s"])
    parser.add_argument("--output", default="", help="file to write; standard output if left out")
    parser.add_argument("--check", action="store_true", help="Slurm: check that sbatch would accept it")
    parser.add_argument("--submit", action="store_true", help="Slurm: check, then submit")
    for name, text in _HELP.items():
        default, flag = getattr(JobSpec, name), f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser
