"""One process of plan.py: prints the seconds of all-reduces of 4 bytes and of the given number of bytes."""

import json
import statistics
import sys
import time

import jax
import numpy as np
from jax.sharding import PartitionSpec

import cyxjax as cx
from cyxjax.core.mesh import PER_REPLICA, put_rows
from cyxjax.core.replica import psum, sync_map
from cyxjax.distributed import process_group

TIMES = 50


def main() -> None:
    group = cx.distributed.init()
    reduce = jax.jit(sync_map(lambda rows: psum(rows[0]), group.mesh, PER_REPLICA, PartitionSpec()))
    found = [seconds(reduce, group.mesh, size) for size in (4, int(sys.argv[1]))]
    if process_group.is_master():
        print(json.dumps({"seconds": found}), flush=True)
    process_group.finalize()


def seconds(reduce, mesh, size: int) -> float:
    rows = put_rows(mesh, np.ones((1, size // 4), np.float32))
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        reduce(rows).block_until_ready()
        took.append(time.perf_counter() - began)
    return statistics.median(took[TIMES // 5 :])


if __name__ == "__main__":
    main()
