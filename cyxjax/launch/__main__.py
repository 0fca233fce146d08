"""`python -m cyxjax.launch --nproc-per-node N script.py ...`: run a script as a group of processes."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the program's); returns its exit code."""
    try:
        from cyxjax.launch import command_line  # here: a Ctrl-C while it loads is one line

        return command_line.main(argv)
    except KeyboardInterrupt:  # before there are ranks: after that the supervisor handles it
        print("cyxjax.launch: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
