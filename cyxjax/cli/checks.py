"""A row of `cyxjax doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One thing looked at: `level` says whether it is in the way of training."""

    level: Literal["ok", "warn", "FAIL"]
    topic: str
    found: str  # a `warn` or `FAIL` ends with a HINT

    def line(self) -> str:
        """`ok    disk      12.3 GB free in /runs`."""
        return f"{self.level:5} {self.topic:9} {self.found}"
