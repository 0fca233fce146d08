"""`python -m cyxjax`: the `cyxjax` command, where its script is not on the path."""

import sys

from cyxjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
