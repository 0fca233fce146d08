"""Waiting for a condition."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float) -> bool:
    """True once `condition()` is; False if it is not within `seconds`. It asks ever less often."""
    start = time.monotonic()
    while (waited := time.monotonic() - start) < seconds:
        if condition():
            return True
        time.sleep(0.02 + waited / 20)
    return bool(condition())
