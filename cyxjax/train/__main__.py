"""`python -m cyxjax.train --config configs/digits.yaml`: one experiment, in this process of the group."""

import sys
from collections.abc import Sequence

from cyxjax.errors import EXIT_CONFIG, EXIT_INTERRUPT, ConfigError, CyxjaxError, DataError
from cyxjax.train.config import load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; the exit code. A configuration that is wrong costs one line and nothing else."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        from cyxjax.train.experiment import run  # imports jax: not needed for --help or a wrong key

        return run(config)
    except (ConfigError, DataError) as err:
        print(f"cyxjax.train: {err}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print("cyxjax.train: interrupted. HINT: run the same command again to go on.", file=sys.stderr)
        return EXIT_INTERRUPT
    except CyxjaxError as err:
        print(f"cyxjax.train: {type(err).__name__}: {err}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
