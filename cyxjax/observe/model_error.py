"""How far `scaling`'s model was from what was measured: real runs on one machine, and a slow wire.

`model_error.json` is what `python scripts/bench/plan.py --write` measured last.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cyxjax.observe.scaling import Wire, exchanges, step_s

FILE = Path(__file__).with_name("model_error.json")
# scripts/bench/comm.py: samples/s at 100 Mbit/s and 1 Gbit/s; 2 processes, batch 64 each, 5.8 M parameters.
_SLOW_WIRES = {
    "mean": (63, 468),
    "zero1": (62, 370),
    "bf16": (120, 508),
    "int8": (209, 585),
    "local_sgd": (433, 1279),
}
_ALONE_S = 0.0657  # a step that sends next to nothing: diloco's, at 1 Gbit/s


class Run(NamedTuple):
    """A real run whose steps were predicted beforehand."""

    work: str
    comm: str
    processes: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@cache
def measured() -> tuple[str, tuple[Run, ...]]:
    """(the machine, the runs) of the file."""
    raw: dict[str, Any] = json.loads(FILE.read_text())
    return raw["machine"], tuple(Run(*row) for row in raw["runs"])


def on_slow_wires() -> list[float]:
    """(predicted - measured) / measured time of a step, for each number of the benchmark on slow wires."""
    import jax
    import numpy as np

    found = exchanges([jax.ShapeDtypeStruct((5_800_000,), np.float32)])
    wires = (Wire(12.5e6, 1e-4), Wire(125e6, 1e-4))
    return [
        step_s(found[name], _ALONE_S, 2, wire) / (2 * 64 / rate) - 1
        for name, rates in _SLOW_WIRES.items()
        for wire, rate in zip(wires, rates, strict=True)
    ]


def lines() -> list[str]:
    """What stands below every prediction."""
    machine, runs = measured()
    by_count = [
        f"{count} process{'es' if count > 1 else ''} {_off(r.error for r in runs if r.processes == count)}"
        for count in sorted({run.processes for run in runs})
    ]
    worst = max(runs, key=lambda run: abs(run.error))
    return [
        f"how far this model was off, in the median and at worst: {'; '.join(by_count)}",
        f"(real runs, loopback, {machine}; worst: {worst.work} under {worst.comm}; scripts/bench/plan.py);",
        f"2 processes at 100 Mbit/s and 1 Gbit/s {_off(on_slow_wires())} (scripts/bench/comm.py, computing "
        "time from its diloco row).",
    ]


def facts() -> dict[str, Any]:
    """The same for a script."""
    machine, runs = measured()
    return {
        "machine": machine,
        "runs": [{**run._asdict(), "error": run.error} for run in runs],
        "slow_wires": on_slow_wires(),
    }


def _off(errors: Iterable[float]) -> str:
    found: Sequence[float] = list(errors)
    return f"{statistics.median(map(abs, found)):.0%}, {max(found, key=abs):+.0%}"
