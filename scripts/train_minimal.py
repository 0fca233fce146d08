"""A guided tour of cyxjax in one program, from data to a saved model, read from top to bottom.

    python scripts/train_minimal.py                                        one process, all its devices
    python -m cyxjax.launch --nproc-per-node 2 scripts/train_minimal.py    two processes on this host
    torchrun --nproc_per_node=2 scripts/train_minimal.py                   the same, started by torchrun

It trains on scikit-learn's 1,797 scans of handwritten digits (no download) in a few seconds on two CPU cores,
and gives the same losses, up to rounding, however it is started, if replicas x batch size is the same.
"""

import argparse
from pathlib import Path

import cyxjax as cx

BEST, MODEL = "best_model.pt", "model.cyxmodel"


def main() -> None:
    options = parse_arguments()

    # 1. The group. A launcher sets the rank in environment variables; without them there is one process.
    #    Nothing here depends on the number of processes. A replica is a device; a rank may own several.
    rank, local_rank, world_size = cx.distributed.setup_distributed()
    print(f"Process {rank}/{world_size} started (local rank {local_rank})")

    # 2. Data: arrays here. Each rank holds all of it, and the trainer assigns every sample to exactly one
    #    replica per epoch. (Memmaps, datasets and loaders work the same way.)
    digits = cx.load_dataset("digits")

    # 3. The trainer compiles forward, backward, reduction and update into one program over all devices.
    model = build_model()
    trainer = cx.distributed.DistributedTrainer(
        model,
        cx.CrossEntropyLoss(),
        cx.AdamOptimizer(options.lr),
        callbacks=[
            cx.BestCheckpoint(options.out / BEST),  # the epoch with the lowest val_loss
            cx.EarlyStopping(patience=5),
        ],
    )
    history = trainer.fit(digits.train, digits.val, settings(options))

    # 4. The results.
    trainer.load_checkpoint(str(options.out / BEST))
    report(trainer, history, digits.test)
    save(trainer, history, model, options.out)
    use(options.out, digits.test)

    # 5. All ranks leave the group together.
    cx.distributed.cleanup()


def build_model() -> cx.SequentialModel:
    """(B, 8, 8) scans -> (B, 10) logits: a stack of layers; any flax.linen or flax.nnx module works too."""
    model = cx.SequentialModel()
    model.add(cx.FlattenModule())
    model.add(cx.LinearModule(64, 128))
    model.add(cx.ReLUModule())
    model.add(cx.LinearModule(128, 10))
    if cx.distributed.is_master():
        print(model.summary())
    return model


def settings(options: argparse.Namespace) -> cx.distributed.DistributedTrainingConfig:
    """How to train. `batch_size` is per replica and micro-step."""
    config = cx.distributed.DistributedTrainingConfig()
    config.epochs = options.epochs
    config.batch_size = options.batch_size
    config.gradient_accumulation_steps = options.accumulate
    # The learning rate is for batches of 64, and is scaled to the number of samples per step of this group.
    config.base_batch_size = 64
    config.lr_scaling = "sqrt"
    config.warmup_steps = 20
    config.checkpoint_dir = str(options.out / "checkpoints")
    config.resume = "auto"  # after an interruption the same command continues the run
    return config


def report(trainer, history, test) -> None:
    """Prints the results on `test`. They are the same on every rank; one rank prints."""
    loss, accuracy = trainer.evaluate(test)
    # The mean over ranks, for numbers that differ between ranks (here it shows that they agree).
    mean_loss = float(cx.distributed.reduce_tensor(loss))
    if trainer.is_master():
        print(f"Test loss {mean_loss:.4f}, accuracy {accuracy:.4f} on {history.num_replicas} replicas")
        print(f"{history.samples_per_second:,.0f} samples/s in {history.total_time_seconds:.1f} s")


def save(trainer, history, model: cx.SequentialModel, folder: Path) -> None:
    """Writes the model, to one file without pickle, and the losses of all epochs."""
    if trainer.is_master():
        model.save(folder / MODEL)
        history.save(folder / "history.json")
    cx.distributed.barrier()  # no rank reads before rank 0 has written


def use(folder: Path, test) -> None:
    """Prints the predictions of the saved model, which needs no group, for the first scans of `test`."""
    images, labels = test.take(range(5))
    guesses = cx.SequentialModel.load(folder / MODEL).eval()(images).argmax(axis=-1)
    if cx.distributed.is_master():
        print(f"First five test samples: predicted {guesses.tolist()}, labels {labels.tolist()}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per replica and micro-step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps per optimizer step")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate for batches of 64")
    parser.add_argument("--out", type=Path, default=Path("runs/minimal"), help="folder of all results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
