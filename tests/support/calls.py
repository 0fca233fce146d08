"""What code costs where time tells nothing: how many functions it calls."""

import sys
from collections.abc import Callable
from typing import Any


def calls_of(run: Callable[[], Any]) -> int:
    """Python and C functions that `run()` calls on this thread."""
    count = 0

    def noted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
