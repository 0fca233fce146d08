"""Compares rows of fsdp's table with `mean`, on all devices of this group's processes: MODEL:SETTINGS ..."""

import sys

import jax

from tests.support.sharded import assert_as_mean

for row in sys.argv[1:]:
    model, settings = row.split(":")
    assert_as_mean(model, None, settings)
    print(f"same {row} on {jax.process_count()}x{jax.local_device_count()}", flush=True)
