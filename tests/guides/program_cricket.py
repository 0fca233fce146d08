"""The cricket-GNN guide's helpers in one program: setup, loaders, averages, rank 0's save, a barrier."""

import sys
from pathlib import Path

import numpy as np

import cyxjax as cx
from cyxjax.distributed import (
    barrier,
    cleanup,
    create_dataloaders_distributed,
    is_main_process,
    reduce_tensor,
    setup_distributed,
)
from tests.support.programs import report


def loaders():
    """Which samples this rank's loaders give; sample i holds the number i."""
    numbers = np.arange(21, dtype=np.float32)[:, None]
    labels = np.zeros(21, np.int32)
    found = create_dataloaders_distributed((numbers, labels), (numbers, labels), batch_size=4, seed=1)
    epochs = []
    for epoch in range(2):
        found.train_sampler.set_epoch(epoch)
        epochs.append([int(n) for inputs, _ in found.train for n in inputs[:, 0]])
    # drop_last leaves out the batch that is not full; the sampler's share is what the ranks are dealt.
    share = found.train_sampler.get_indices().tolist()
    val = [int(n) for inputs, _ in found.val for n in inputs[:, 0]]
    return {"train": share, "val": val, "orders_differ": epochs[0] != epochs[1]}


def save_and_load(folder):
    """Rank 0 saves, all wait, all load."""
    X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    y, path = np.arange(12) % 3, f"{folder}/best_model.pt"
    model = cx.SequentialModel([cx.LinearModule(3, 3)])
    trainer = cx.Trainer(model, cx.SGDOptimizer(0.1), None, cx.CrossEntropyLoss(), best_model=None)
    trainer.train((X, y), epochs=1)
    if trainer.is_main:
        trainer.save_checkpoint(path)
    if trainer.is_distributed:
        barrier()
    found = Path(path).is_dir()
    before = trainer.evaluate(X, y)[0]
    trainer.load_checkpoint(path)
    return {"found_after_barrier": found, "loaded": [before, trainer.evaluate(X, y)[0]]}


def main(folder):
    rank, local_rank, world_size = setup_distributed()
    values = {"place": [rank, local_rank, world_size], "main": is_main_process()}
    average = reduce_tensor({"a": np.array([rank, rank + 1.0], np.float32), "b": np.float32(rank + 2)})
    values |= {
        "mean": float(reduce_tensor(np.array([float(rank)]))[0]),
        "mean_of_many": [np.asarray(average["a"]).tolist(), float(average["b"])],
    }
    values |= loaders() | save_and_load(folder)
    cleanup()
    report(folder, rank, values)


if __name__ == "__main__":
    main(sys.argv[1])
