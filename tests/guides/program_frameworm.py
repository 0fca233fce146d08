"""The FRAMEWORM guide's program: a VAE trained by `spawn`ed processes, and a loop with amp and PowerSGD."""

import sys

import numpy as np

import cyxjax as cx
import cyxjax.distributed as dist
from cyxjax.distributed import DistributedDataParallel as DDP
from cyxjax.distributed.comm_hooks import powerSGD_hook
from tests.support.programs import report

SAMPLES = 37  # no multiple of anything


def images():
    """Dark squares with a bright corner: values in [0, 1]."""
    pictures = np.random.default_rng(0).uniform(0, 0.2, (SAMPLES, 4, 4)).astype(np.float32)
    pictures[:, :2, :2] += 0.7
    return pictures


def train_ddp(rank, world_size, config, folder):
    """What each process runs: `setup`, model, sampler, loader, trainer, `cleanup`."""
    dist.init_process_group(backend="gloo", init_method="env://", rank=rank, world_size=world_size)
    model = DDP(cx.get_model("vae")(config), device_ids=[rank])
    pictures = images()
    sampler = dist.DistributedSampler(pictures, num_replicas=world_size, rank=rank, shuffle=True)
    loader = cx.data.DataLoader(
        pictures, batch_size=8 // world_size, sampler=sampler, num_workers=2, pin_memory=True
    )
    trainer = cx.Trainer(model, cx.AdamOptimizer(0.01), device=rank, best_model=f"{folder}/best_model.pt")
    trainer.enable_gradient_checkpointing()
    history = trainer.train(loader, cx.data.DataLoader(pictures, batch_size=8), epochs=3)
    values = {"losses": history.train_losses, "val_losses": history.val_losses, "steps": history.num_steps}
    values |= {"batch": history.effective_batch_size, "shape": list(trainer.predict(pictures)["loss"].shape)}
    values["evaluated"] = trainer.evaluate(pictures)[0]
    if trainer.is_main:  # alone; a barrier holds the others
        trainer.save_checkpoint(f"{folder}/model.pt")
    if trainer.is_distributed:
        dist.barrier()
    trainer.load_checkpoint(f"{folder}/model.pt")
    values["loaded"] = trainer.evaluate(pictures)[0]
    values |= compressed(rank, world_size)
    dist.destroy_process_group()
    report(folder, rank, values)


def compressed(rank, world_size):
    """float16 with a loss scale, gradients by PowerSGD, and the monitoring line."""
    model = DDP(cx.get_model("vae")(latent_size=2, hidden=(8,)), device_ids=[rank])
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, scaler, losses = cx.SGDOptimizer(0.05), cx.amp.GradScaler(init_scale=1024.0), []
    batch = images()[rank::world_size]
    for _ in range(4):
        model.zero_grad()
        with cx.amp.autocast():
            output = model(batch)
            loss = model.loss(None, output)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average = float(dist.all_reduce(np.float32(loss.item()), op=dist.ReduceOp.SUM)) / world_size
        losses.append(average)
        if rank == 0:
            print(f"Average loss across all GPUs: {average:.4f}")
    weights = float(sum(np.abs(leaf).sum() for leaf in _leaves(model.parameters())))
    return {"compressed": losses, "weights": weights, "scale": scaler.get_scale()}


def _leaves(tree):
    return [leaf for part in tree.values() for leaf in _leaves(part)] if isinstance(tree, dict) else [tree]


if __name__ == "__main__":
    settings = cx.Config.from_file(f"{sys.argv[1]}/config.yaml")
    dist.spawn(train_ddp, args=(settings, sys.argv[1]), nprocs=2, join=True)
