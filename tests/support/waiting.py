"""Waiting for a condition."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float) -> bool:
    """True once `condition()` is; False if it is not within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
