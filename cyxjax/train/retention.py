"""Which steps outlive a save: the newest and the best."""

import math
from collections.abc import Mapping
from typing import Literal

Best = Literal["min", "max"]


def kept_steps(
    metrics: Mapping[int, float | None], keep_last: int, keep_best: int, best: Best = "min"
) -> set[int]:
    """Of the steps in `metrics`, the `keep_last` newest and the `keep_best` best; ties go to the newer step.

    Steps whose metric is missing or not finite are never among the best.
    """
    sign = 1.0 if best == "min" else -1.0
    ranked = [
        (sign * value, -step) for step, value in metrics.items() if value is not None and math.isfinite(value)
    ]
    return set(sorted(metrics)[-keep_last:]) | {-step for _, step in sorted(ranked)[:keep_best]}
