"""The data of plan.py's experiments, which their configuration names as `plan_work:data`."""

import numpy as np
import peers_work

Arrays = tuple[np.ndarray, np.ndarray]


def data(work: str) -> tuple[Arrays, Arrays, Arrays]:
    """(train, validation, test); the last two are not used."""
    x, y = peers_work.data(work)
    few = (x[:8], y[:8])
    return (x, y), few, few
