"""`cx.distributed`: the group of processes, its collectives, wrappers and trainers, by torch's names."""

from importlib import import_module
from typing import Any

_HOME = {
    "collectives": (
        "ReduceOp",
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "broadcast_object",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_tensor",
        "scatter",
    ),
    "dataloaders": ("create_dataloaders_distributed",),
    "comm_hooks": (
        "CommHook",
        "PowerSGDState",
        "allreduce_hook",
        "bf16_compress_hook",
        "fp16_compress_hook",
        "powerSGD_hook",
    ),
    "data_parallel": ("DataParallel",),
    "ddp": ("DistributedDataParallel",),
    "ddp_config": ("DDPConfig",),
    "process_group": (
        "BackendType",
        "DistributedConfig",
        "cleanup",
        "destroy_process_group",
        "finalize",
        "get_local_rank",
        "get_num_replicas",
        "get_rank",
        "get_world_size",
        "init",
        "init_process_group",
        "is_initialized",
        "is_main_process",
        "is_master",
        "setup_distributed",
    ),
    "spawning": ("SpawnError", "Spawned", "spawn"),
    "sampler": ("DistributedBatchIterator", "DistributedSampler"),
}
_UPSTAIRS = {  # documented here, but they live in rooms above this one
    "DistributedTrainer": "cyxjax.train.trainer",
    "DistributedTrainingConfig": "cyxjax.config.run",
    "DistributedTrainingHistory": "cyxjax.observe.history",
}
_MODULES = {name: f"cyxjax.distributed.{file}" for file, names in _HOME.items() for name in names} | _UPSTAIRS

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'cyxjax.distributed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
