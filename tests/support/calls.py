"""The cost of code where times are too noisy: how many functions it calls."""

import sys
from collections.abc import Callable
from typing import Any


def calls_of(run: Callable[[], Any]) -> int:
    """The number of calls of Python and C functions that `run()` makes on this thread."""
    count = 0

    def count_call(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
