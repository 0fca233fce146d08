"""A process group of one process, and models wrapped in it."""

from typing import Any

import jax

from cyxjax.core.mesh import build_mesh
from cyxjax.distributed.ddp import DistributedDataParallel
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.launch.topology import Topology
from tests.support.models import CRITERION


def alone(num_devices: int = 1) -> ProcessGroup:
    """A group of this process, with its first devices; it is not the current one."""
    return ProcessGroup(Topology(), "gloo", build_mesh(jax.devices()[:num_devices]))


def step(ddp: DistributedDataParallel, samples: Any, optimizer: Any) -> None:
    """A step with cross entropy. samples: with `inputs` and `targets`."""
    ddp.loss(CRITERION, ddp(samples.inputs), samples.targets).backward()
    ddp.update_parameters(optimizer)


def wrap(model: Any, num_devices: int = 1, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=alone(num_devices), **options)
