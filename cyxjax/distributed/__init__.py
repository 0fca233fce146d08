"""`cx.distributed`: the process group, collectives, wrappers and trainers, with torch's names."""

from typing import TYPE_CHECKING

from cyxjax import _lazy

_FILES = {  # module of cyxjax -> the public names it holds
    "distributed.collectives": "ReduceOp all_gather all_gather_object all_reduce all_to_all barrier "
    "broadcast broadcast_object gather reduce reduce_scatter reduce_tensor scatter",
    "distributed.comm_hooks": "CommHook PowerSGDState allreduce_hook bf16_compress_hook fp16_compress_hook "
    "powerSGD_hook",
    "distributed.data_parallel": "DataParallel",
    "distributed.ddp": "DistributedDataParallel",
    "distributed.ddp_state": "DDPConfig",
    "distributed.process_group": "BackendType DistributedConfig cleanup destroy_process_group finalize "
    "get_local_rank get_num_replicas get_rank get_world_size init init_process_group is_initialized "
    "is_main_process is_master setup_distributed",
    "distributed.spawning": "SpawnError Spawned spawn",
    "distributed.sampler": "DistributedBatchIterator DistributedSampler create_dataloaders_distributed",
    # Documented here; their packages import this one.
    "train.trainer": "DistributedTrainer",
    "config.run": "DistributedTrainingConfig",
    "observe.history": "DistributedTrainingHistory",
}


if TYPE_CHECKING:  # for editors and type checkers; a test holds this equal to the table above
    from cyxjax.config.run import DistributedTrainingConfig as DistributedTrainingConfig
    from cyxjax.distributed.collectives import ReduceOp as ReduceOp
    from cyxjax.distributed.collectives import all_gather as all_gather
    from cyxjax.distributed.collectives import all_gather_object as all_gather_object
    from cyxjax.distributed.collectives import all_reduce as all_reduce
    from cyxjax.distributed.collectives import all_to_all as all_to_all
    from cyxjax.distributed.collectives import barrier as barrier
    from cyxjax.distributed.collectives import broadcast as broadcast
    from cyxjax.distributed.collectives import broadcast_object as broadcast_object
    from cyxjax.distributed.collectives import gather as gather
    from cyxjax.distributed.collectives import reduce as reduce
    from cyxjax.distributed.collectives import reduce_scatter as reduce_scatter
    from cyxjax.distributed.collectives import reduce_tensor as reduce_tensor
    from cyxjax.distributed.collectives import scatter as scatter
    from cyxjax.distributed.comm_hooks import CommHook as CommHook
    from cyxjax.distributed.comm_hooks import PowerSGDState as PowerSGDState
    from cyxjax.distributed.comm_hooks import allreduce_hook as allreduce_hook
    from cyxjax.distributed.comm_hooks import bf16_compress_hook as bf16_compress_hook
    from cyxjax.distributed.comm_hooks import fp16_compress_hook as fp16_compress_hook
    from cyxjax.distributed.comm_hooks import powerSGD_hook as powerSGD_hook
    from cyxjax.distributed.data_parallel import DataParallel as DataParallel
    from cyxjax.distributed.ddp import DistributedDataParallel as DistributedDataParallel
    from cyxjax.distributed.ddp_state import DDPConfig as DDPConfig
    from cyxjax.distributed.process_group import BackendType as BackendType
    from cyxjax.distributed.process_group import DistributedConfig as DistributedConfig
    from cyxjax.distributed.process_group import cleanup as cleanup
    from cyxjax.distributed.process_group import destroy_process_group as destroy_process_group
    from cyxjax.distributed.process_group import finalize as finalize
    from cyxjax.distributed.process_group import get_local_rank as get_local_rank
    from cyxjax.distributed.process_group import get_num_replicas as get_num_replicas
    from cyxjax.distributed.process_group import get_rank as get_rank
    from cyxjax.distributed.process_group import get_world_size as get_world_size
    from cyxjax.distributed.process_group import init as init
    from cyxjax.distributed.process_group import init_process_group as init_process_group
    from cyxjax.distributed.process_group import is_initialized as is_initialized
    from cyxjax.distributed.process_group import is_main_process as is_main_process
    from cyxjax.distributed.process_group import is_master as is_master
    from cyxjax.distributed.process_group import setup_distributed as setup_distributed
    from cyxjax.distributed.sampler import DistributedBatchIterator as DistributedBatchIterator
    from cyxjax.distributed.sampler import DistributedSampler as DistributedSampler
    from cyxjax.distributed.sampler import (
        create_dataloaders_distributed as create_dataloaders_distributed,
    )
    from cyxjax.distributed.spawning import Spawned as Spawned
    from cyxjax.distributed.spawning import SpawnError as SpawnError
    from cyxjax.distributed.spawning import spawn as spawn
    from cyxjax.observe.history import DistributedTrainingHistory as DistributedTrainingHistory
    from cyxjax.train.trainer import DistributedTrainer as DistributedTrainer
else:
    __all__, __getattr__, __dir__ = _lazy(__name__, _FILES)
