"""`DataParallel`: torch's wrapper for the devices of one process."""

from typing import Any

import jax

from cyxjax.core.mesh import build_mesh
from cyxjax.distributed.ddp import DistributedDataParallel
from cyxjax.distributed.process_group import ProcessGroup, current, is_initialized
from cyxjax.errors import GroupError
from cyxjax.launch.topology import Topology


def DataParallel(model: Any, device_ids: Any = None, **options: Any) -> DistributedDataParallel:
    """`model` over all devices of this process; prints how many. Options as `DistributedDataParallel`.

    torch scatters and gathers in each step; this runs the same program as several processes: one reduction.
    Raises: GroupError in a group of several processes, whose gradients it would not average.
    """
    if is_initialized() and current().topology.world_size > 1:
        raise GroupError(
            f"DataParallel is for one process, but this is a group of {current().topology.world_size}. "
            "HINT: use DistributedDataParallel(model)."
        )
    devices = jax.local_devices()
    name = {"cpu": "CPU device", "gpu": "GPU"}.get(devices[0].platform, "device")
    print(f"Using {len(devices)} {name}{'s' if len(devices) != 1 else ''}")
    group = ProcessGroup(Topology(), "nccl" if devices[0].platform == "gpu" else "gloo", build_mesh(devices))
    return DistributedDataParallel(model, device_ids=device_ids, process_group=group, **options)
