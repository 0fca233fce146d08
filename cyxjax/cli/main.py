"""The `cyxjax` command: runs the subcommand that the first argument names, and imports only its module."""

import sys
from collections.abc import Sequence
from importlib import import_module

from cyxjax.command import drop_output, prepare_streams, show
from cyxjax.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPT,
    EXIT_USER_ERROR,
    ConfigError,
    CyxjaxError,
    known,
    nearest,
)
from cyxjax.redaction import redact

# word -> (module:function that takes the remaining words and gives an exit code, one line of help)
ROWS: dict[str, tuple[str, str]] = {
    "train": ("cyxjax.train.__main__:main", "train the experiment in a YAML file"),
    "launch": ("cyxjax.launch.__main__:main", "start the processes of a script or module on this host"),
    "top": ("cyxjax.launch.supervise.top:main", "watch a running job on this host: steps, phases, memory"),
    "checkpoint": (
        "cyxjax.cli.checkpoint:main",
        "list, verify, export and prune the checkpoints of a run",
    ),
    "init": ("cyxjax.cli.init:main", "write the files of a new project that is ready to train"),
    "predict": ("cyxjax.cli.stored_run:predict", "write the outputs of a run's model for the rows of a file"),
    "evaluate": ("cyxjax.cli.stored_run:evaluate", "evaluate a run's model on its own or other samples"),
    "export": (
        "cyxjax.cli.stored_run:export",
        "write the model of a run as safetensors, HF folder, StableHLO or ONNX",
    ),
    "audit": ("cyxjax.cli.audit:main", "check that a run used each sample exactly once per epoch"),
    "report": ("cyxjax.cli.report:main", "write an HTML report of a run, or of several runs compared"),
    "hash": ("cyxjax.cli.hash:main", "print digests of a run's state, or what differs between two runs"),
    "replay": (
        "cyxjax.train.replay.steps:main",
        "rerun a step with non-finite values, and name the first bad layer",
    ),
    "manifest": ("cyxjax.launch.job_files:main", "write job files for Slurm or Kubernetes"),
    "plan": ("cyxjax.cli.plan:main", "show what a step sends and holds in memory, without training"),
    "config": ("cyxjax.cli.config:main", "show the resolved configuration of an experiment"),
    "env": ("cyxjax.cli.env:main", "show which rank, world size and backend were found, and why"),
    "doctor": ("cyxjax.cli.doctor:main", "check this machine: versions, devices, threads, ports, disk"),
    "completion": ("cyxjax.cli.completion:main", "print a script that completes these commands in a shell"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's arguments) names; gives its exit code."""
    prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except (OSError, OverflowError) as err:
        if words[:1] in (["train"], ["launch"]):
            raise  # the run's own handlers must see the error
        drop_output()  # buffered output would fail once more when Python exits
        if not isinstance(err, BrokenPipeError):  # as from `cyxjax checkpoint ls DIR | head`
            print(f"cyxjax: {known(err, system=True)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("cyxjax: interrupted. HINT: run the same command again.", file=sys.stderr)
        return EXIT_INTERRUPT
    except CyxjaxError as err:
        print(f"cyxjax: {redact(str(err))}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(err, ConfigError) else EXIT_USER_ERROR


def dispatch(words: Sequence[str]) -> int:
    """Runs one command. Raises: ConfigError for an unknown command, and what the command raises."""
    if not words or words[0] in ("-h", "--help", "help"):
        show(f"{overview()}\n")
        return 0
    if words[0] == "--version":
        print(f"cyxjax {import_module('cyxjax').__version__}")
        return 0
    if words[0] not in ROWS:
        raise ConfigError(f"no command {words[0]!r}. {nearest(words[0], ROWS)} HINT: `cyxjax --help`.")
    module, _, function = ROWS[words[0]][0].partition(":")
    return int(getattr(import_module(module), function)(list(words[1:])) or 0)


def overview() -> str:
    """The commands, one per line."""
    width = max(map(len, ROWS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in ROWS.items()]
    return "\n".join(["usage: cyxjax COMMAND ...   (more: cyxjax COMMAND --help)", "", *lines])
