"""Where small questions before training are computed."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def on_host() -> Iterator[jax.Device]:
    """Small work, which an accelerator would only compile longer; where there is no CPU it does it."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others
        device = jax.local_devices()[0]
    with jax.default_device(device):
        yield device
