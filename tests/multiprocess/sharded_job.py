"""Rows of fsdp's table against `mean`, on all devices of all processes of this group: MODEL:SETTINGS ..."""

import sys

import jax

from tests.support.sharded import assert_as_mean

for row in sys.argv[1:]:
    model, settings = row.split(":")
    assert_as_mean(model, None, settings)
    print(f"same {row} on {jax.process_count()}x{jax.local_device_count()}", flush=True)
