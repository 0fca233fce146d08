"""What each process of the FRAMEWORM guide runs: it trains a VAE."""

import numpy as np

import cyxjax as cx
import cyxjax.distributed as dist
from cyxjax.distributed import DistributedDataParallel as DDP
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
    dist.destroy_process_group()
    report(folder, rank, values)
