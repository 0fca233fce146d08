"""Creates the stored step of the current format, which every later cyxjax must load: checkpoint_v2.

Run it once when the major version of the format changes; a minor version must load the stored step unchanged.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.manifest import FORMAT_VERSION

META = {"epoch": 3, "data": {"seed": 42, "consumed": 96}, "losses": [0.5, float("nan")]}


def fixture_state():
    """A state with every dtype class, and small numbers that are exact in each."""
    kernel = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    params = {"Dense_0": {"kernel": kernel, "bias": jnp.arange(3, dtype=jnp.bfloat16)}}
    return {
        "step": jnp.int32(12),
        "params": params,
        "model_state": {"count": np.array(2**40, np.int64), "empty": np.zeros((0, 2), np.float64)},
        "sync": optax.adamw(1e-3).init(params),
        "key": jnp.array([7, 2**32 - 1], jnp.uint32),
    }


if __name__ == "__main__":
    with Checkpointer(Path(__file__).with_name(f"checkpoint_v{FORMAT_VERSION[0]}")) as checkpointer:
        checkpointer.save(12, fixture_state(), META, metric=0.5)
