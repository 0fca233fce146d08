"""The documented names of five training guides and the names here; the documentation shows the table.

python -m tests.guides.porting   # prints it
"""

import re
from pkgutil import resolve_name
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One name of a guide, and ours: a dotted name that begins with `cx` (or `cyxjax`)."""

    guide: str
    theirs: str
    ours: str
    note: str = ""


A, B, C, D, E = "CyxWiz", "TensorBrain", "cricket-GNN", "FRAMEWORM", "Genesis"
_VALUES = "`x = all_reduce(x)`; as a statement it fills a numpy array"
_DIST = "cx.distributed"
_DDP = f"{_DIST}.DistributedDataParallel"
_TRAINER = f"{_DIST}.DistributedTrainer"

ROWS = [
    Row(A, "cx.distributed.init()", f"{_DIST}.init"),
    Row(A, "cx.distributed.finalize()", f"{_DIST}.finalize"),
    Row(A, "is_initialized()", f"{_DIST}.is_initialized"),
    Row(A, "get_rank()", f"{_DIST}.get_rank"),
    Row(A, "get_world_size()", f"{_DIST}.get_world_size"),
    Row(A, "get_local_rank()", f"{_DIST}.get_local_rank"),
    Row(A, "is_master()", f"{_DIST}.is_master"),
    Row(A, "DistributedConfig", f"{_DIST}.DistributedConfig"),
    Row(A, "DistributedConfig.from_environment()", f"{_DIST}.DistributedConfig.from_environment"),
    Row(A, "BackendType.CPU, NCCL", f"{_DIST}.BackendType", "CPU is gloo; AUTO is the default"),
    Row(A, "DDPConfig", f"{_DIST}.DDPConfig"),
    Row(A, "DistributedDataParallel", _DDP),
    Row(A, "ddp.forward(x)", f"{_DDP}.forward"),
    Row(A, "ddp.backward(grad)", f"{_DDP}.backward"),
    Row(A, "ddp.sync_gradients()", f"{_DDP}.sync_gradients"),
    Row(A, "ddp.update_parameters(optimizer)", f"{_DDP}.update_parameters"),
    Row(A, "ddp.get_model()", f"{_DDP}.get_model"),
    Row(A, "DistributedSampler", f"{_DIST}.DistributedSampler"),
    Row(A, "sampler.set_epoch, get_indices", f"{_DIST}.DistributedSampler.set_epoch"),
    Row(A, "DistributedBatchIterator", f"{_DIST}.DistributedBatchIterator"),
    Row(A, "DistributedTrainer(model, loss, optimizer)", _TRAINER),
    Row(A, "DistributedTrainingConfig", f"{_DIST}.DistributedTrainingConfig"),
    Row(A, "DistributedTrainingHistory", f"{_DIST}.DistributedTrainingHistory"),
    Row(A, "trainer.fit", f"{_TRAINER}.fit"),
    Row(A, "trainer.evaluate", f"{_TRAINER}.evaluate"),
    Row(A, "trainer.save_checkpoint, load_checkpoint", f"{_TRAINER}.save_checkpoint"),
    Row(A, "SequentialModel, LinearModule, ReLUModule", "cx.SequentialModel"),
    Row(A, "model.save(path)", "cx.SequentialModel.save", "safetensors, never pickle"),
    Row(A, "CrossEntropyLoss", "cx.CrossEntropyLoss"),
    Row(A, "AdamOptimizer", "cx.AdamOptimizer", "an optax transformation"),
    Row(B, "DataParallel(model)", f"{_DIST}.DataParallel"),
    Row(B, "dist.init_process_group", f"{_DIST}.init_process_group"),
    Row(B, "DDP(model, device_ids=[rank])", _DDP),
    Row(B, "utils.data.DistributedSampler", f"{_DIST}.DistributedSampler"),
    Row(B, "utils.data.DataLoader", "cx.data.DataLoader"),
    Row(
        B,
        "loss.backward()",
        f"{_DDP}.loss",
        "`ddp.loss(criterion, out, y).backward()`",
    ),
    Row(B, "optimizer.step()", f"{_DDP}.update_parameters", "or `optimizer.step()`, made with the ddp"),
    Row(
        B,
        "optimizer.zero_grad()",
        f"{_DDP}.zero_grad",
        "after an update they are zero",
    ),
    Row(B, "model.no_sync()", f"{_DDP}.no_sync", "backward never sends anything"),
    Row(B, "dist.barrier()", f"{_DIST}.barrier"),
    Row(B, "dist.all_reduce(x, op)", f"{_DIST}.all_reduce", _VALUES),
    Row(B, "dist.ReduceOp", f"{_DIST}.ReduceOp"),
    Row(B, "dist.all_gather(list, x)", f"{_DIST}.all_gather", "the same, or `xs = all_gather(x)`"),
    Row(
        B,
        "dist.broadcast(x, src)",
        f"{_DIST}.broadcast",
        "`x = broadcast(x, src)`; as a statement it fills a numpy array",
    ),
    Row(B, "dist.scatter(x, list, src)", f"{_DIST}.scatter", "the same, or `x = scatter(list, src)`"),
    Row(
        B,
        "torchrun --nproc_per_node=4 train.py",
        "cyxjax.launch",
        "`python -m cyxjax.launch`, or torchrun itself",
    ),
    Row(B, "nn.ResNet50()", "cx.get_model", '`cx.get_model("resnet50")()`'),
    Row(C, "setup_distributed()", f"{_DIST}.setup_distributed"),
    Row(C, "is_main_process()", f"{_DIST}.is_main_process"),
    Row(C, "reduce_tensor(x)", f"{_DIST}.reduce_tensor"),
    Row(C, "barrier()", f"{_DIST}.barrier"),
    Row(C, "cleanup()", f"{_DIST}.cleanup"),
    Row(C, "create_dataloaders_distributed", f"{_DIST}.create_dataloaders_distributed"),
    Row(C, "Trainer(..., device=None)", "cx.Trainer"),
    Row(C, "save_checkpoint('best_model.pt')", "cx.Trainer.save_checkpoint", "kept by itself: `best_model=`"),
    Row(C, "wandb.init on rank 0", "cyxjax.config.experiment.TrainConfig.sinks", "`sinks: [wandb]`"),
    Row(D, "Config.from_file", "cx.Config.from_file"),
    Row(D, "get_model('vae')(config)", "cx.get_model"),
    Row(D, "Trainer(model, optimizer, device)", "cx.Trainer"),
    Row(D, "trainer.train(train_loader, val_loader, epochs)", "cx.Trainer.train"),
    Row(D, "trainer.enable_gradient_checkpointing()", "cx.Trainer.enable_gradient_checkpointing"),
    Row(
        D,
        "mp.spawn(fn, args, nprocs, join)",
        f"{_DIST}.spawn",
        "calls `fn(rank, world_size, *args)`, or torch's `fn(rank, *args)`",
    ),
    Row(D, "dist.destroy_process_group()", f"{_DIST}.destroy_process_group"),
    Row(D, "autocast()", "cx.amp.autocast", "or the trainer's `precision`"),
    Row(D, "GradScaler()", "cx.amp.GradScaler"),
    Row(D, "powerSGD_hook.PowerSGDState", f"{_DIST}.PowerSGDState"),
    Row(D, "powerSGD_hook.powerSGD_hook", f"{_DIST}.powerSGD_hook", 'or the trainer\'s `comm: "power_sgd"`'),
    Row(D, "model.register_comm_hook", f"{_DDP}.register_comm_hook"),
    Row(E, "dist.init_process_group", f"{_DIST}.init_process_group"),
    Row(
        E,
        "DDP(gradient_as_bucket_view=)",
        f"{_DIST}.DDPConfig.gradient_as_bucket_view",
    ),
    Row(E, "ddp_model.parameters()", f"{_DDP}.parameters"),
    Row(E, "ddp_model.train()", f"{_DDP}.train"),
    Row(E, "nn.functional.cross_entropy", "cx.CrossEntropyLoss"),
    Row(E, "genesis.amp.autocast, GradScaler", "cx.amp"),
    Row(E, "launcher.py --gpus 2 --script train.py", "cyxjax.launch", "the same flags"),
]


def resolve(dotted: str) -> Any:
    """The object with a name of the table. Raises: AttributeError, KeyError if there is none."""
    name = re.sub(r"^cx\b", "cyxjax", dotted)
    try:
        return resolve_name(name)
    except AttributeError:  # a configuration key is not an attribute of its class
        above, _, key = name.rpartition(".")
        return resolve_name(above).model_fields[key]


def table() -> str:
    """The rows as a Markdown table, by guide."""
    lines = ["| guide | there | here | |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.guide} | `{row.theirs}` | `{row.ours}` | {row.note} |" for row in ROWS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
