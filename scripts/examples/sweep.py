"""A sweep: one run per point of a grid, each in its own run folder, then one page that compares them.

python scripts/examples/sweep.py && cyxjax report runs/sweep --output sweep.html
"""

import itertools

import cyxjax as cx

GRID = {"lr": (0.003, 0.01), "hidden": (32, 64)}


class Pruning(cx.Callback):
    """Ends a run on all ranks if optuna prunes it. trial: optuna's on rank 0, None on the others."""

    def __init__(self, trial):
        self.trial, self.pruned = trial, False

    def on_epoch(self, info):
        if self.trial is None:
            return False
        self.trial.report(info.val["loss"], info.position.epoch)
        self.pruned = self.trial.should_prune()
        return self.pruned


def train(name, lr, hidden, epochs, callbacks=()):
    data = cx.load_dataset("digits")
    model = cx.get_model("mlp")(hidden=(hidden,))
    trainer = cx.DistributedTrainer(model, cx.CrossEntropyLoss(), cx.AdamOptimizer(lr), callbacks=callbacks)
    return trainer.fit(
        data.train,
        data.val,
        epochs=epochs,
        global_batch_size=128,
        resume="never",
        run_dir=f"runs/sweep/{name}",
        verbose=False,
    )


def main(epochs=3, grid=GRID):
    results = {}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        name = "_".join(f"{key}-{value}" for key, value in point.items())
        results[name] = train(name, **point, epochs=epochs)
    best = min(results, key=lambda name: min(results[name].val_losses))
    if cx.distributed.get_rank() == 0:
        for name, history in results.items():
            print(f"{name}: validation loss {min(history.val_losses):.4f}{' (best)' * (name == best)}")
    return results[best].train_losses


if __name__ == "__main__":
    main()
