"""`python -m cyxjax.cli`: the `cyxjax` command."""

import sys

from cyxjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
