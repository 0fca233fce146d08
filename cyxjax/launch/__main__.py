"""`python -m cyxjax.launch --nproc-per-node N script.py ...`: run a script as a group of processes.

`--slurm` as the first word writes, checks and submits an sbatch script instead (see job_files);
`--dump JOB` shows what the ranks of a running job are executing (see dump).
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the program's); returns its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before there are ranks: after that the supervisor handles it
        print("cyxjax.launch: interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    # Imported here, so that a Ctrl-C while they load prints one line.
    import os

    from cyxjax.command import prepare_streams
    from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, ConfigError, CyxjaxError, known
    from cyxjax.launch import output, save_request
    from cyxjax.redaction import redact

    prepare_streams()
    if argv[:1] == ["--slurm"]:  # the same job, through the queue
        from cyxjax.launch import job_files

        return job_files.main(["slurm", "--submit", *argv[1:]])
    save_request.listen()  # a request before there are ranks ends no process
    try:
        if argv[:1] == ["--dump"]:
            from cyxjax.launch.supervise import dump

            return dump.main(argv[1:])
        from cyxjax.launch.options import parse
        from cyxjax.launch.supervise.supervisor import Supervisor

        env = dict(os.environ)  # of the ranks, which keep the level of native logs
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # of this process; a parent that has loaded jax hands on 1
        return Supervisor(parse(argv, env), env).run()
    except Exception as raised:
        error = raised if isinstance(raised, CyxjaxError) else known(raised)
        if error is None:
            raise
        output.say(f"{type(error).__name__}: {redact(str(error))}")
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_INFRASTRUCTURE
    finally:
        output.flush()


if __name__ == "__main__":
    sys.exit(main())
