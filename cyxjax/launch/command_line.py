"""The command line of the launcher.

`--slurm` as the first word writes, checks and submits an sbatch script instead (see job_files);
`--dump JOB` shows where the ranks of a running job stand (see dump).
"""

import os
import sys
from collections.abc import Sequence

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, ConfigError, CyxjaxError, known
from cyxjax.files import open_closed_streams, redact
from cyxjax.launch import output, save_request


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the program's); returns its exit code."""
    open_closed_streams()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--slurm"]:  # the same job, through the queue
        from cyxjax.launch import job_files

        return job_files.main(["slurm", "--submit", *given[1:]])
    save_request.listen()  # one that comes before there are ranks ends nobody
    try:
        if given[:1] == ["--dump"]:
            from cyxjax.launch.supervise import dump

            return dump.main(given[1:])
        from cyxjax.launch.options import parse
        from cyxjax.launch.supervise.supervisor import Supervisor

        options = parse(given, os.environ)
        return Supervisor(options, os.environ).run()
    except Exception as raised:
        error = raised if isinstance(raised, CyxjaxError) else known(raised)
        if error is None:
            raise
        output.say(f"{type(error).__name__}: {redact(str(error))}")
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_INFRASTRUCTURE
    finally:
        output.flush()
