"""`python -m cyxjax.train --config configs/digits.yaml`: one experiment in this process of the group."""

import gc
import sys
from collections.abc import Sequence

from cyxjax.command import prepare_streams
from cyxjax.errors import (
    EXIT_CONFIG,
    EXIT_INTERRUPT,
    EXIT_USER_ERROR,
    ConfigError,
    CyxjaxError,
    DataError,
    known,
)
from cyxjax.launch import save_request
from cyxjax.launch.clusters import discover
from cyxjax.launch.environment import here
from cyxjax.redaction import redact


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and returns the exit code. Configuration errors print one line and write nothing."""
    prepare_streams()
    save_request.listen()  # before slow imports: a SIGUSR1 during start-up must not end the process
    writing = False
    try:
        from cyxjax.config.load import load_config  # here: a Ctrl-C while it loads also prints one line

        config = load_config(sys.argv[1:] if argv is None else argv, env=here())
        if config.verbose and discover(here()).rank == 0:
            print("Starting: loading jax, the data and the model", flush=True)
        from cyxjax.train import experiment  # imports jax: not needed for --help or a wrong key

        prepared = experiment.prepare(config, goes_on=True)
        gc.freeze()  # libraries and traces stay: later collections skip them
        gc.enable()
        writing = True
        return experiment.train(prepared)
    except KeyboardInterrupt:
        print("cyxjax.train: interrupted. HINT: run the same command again to continue.", file=sys.stderr)
        return EXIT_INTERRUPT
    except Exception as raised:
        err = raised if isinstance(raised, CyxjaxError) else None if writing else known(raised, system=True)
        if err is None:
            raise
        wrong = ConfigError if writing else (ConfigError, DataError)
        code = EXIT_CONFIG if isinstance(err, wrong) else EXIT_USER_ERROR
        from cyxjax.launch.failure import hooks

        hooks.end(err, code)
        kind = "" if code == EXIT_CONFIG else f"{type(err).__name__}: "
        print(f"cyxjax.train: {kind}{redact(str(err))}", file=sys.stderr)
        return code


if __name__ == "__main__":
    gc.disable()  # while libraries are loaded and steps are traced: it takes a tenth of that time
    sys.exit(main())
