"""Pruned trials of optuna end on all ranks after the same epoch."""

import pytest

import cyxjax as cx
from tests.multiprocess.conftest import forked_spawn as forked_spawn
from tests.support.places import ROOT, module_of

SWEEP = ROOT / "scripts" / "examples" / "sweep.py"
TRIALS, EPOCHS = 3, 3


def study():
    """(epochs of each trial, states of the trials on rank 0)."""
    import optuna

    sweep = module_of(SWEEP)
    epochs = []

    def objective(trial=None):
        # The first trial learns; the later ones hardly do, and are worse after one epoch.
        lr = cx.distributed.broadcast_object(trial and (0.01 if trial.number == 0 else 1e-6))
        pruning = sweep.Pruning(trial)
        history = sweep.train(f"trial-{len(epochs)}", lr, 16, EPOCHS, callbacks=[pruning])
        epochs.append(len(history.epochs))
        if pruning.pruned:
            raise optuna.TrialPruned
        return min(history.val_losses)

    if cx.distributed.get_rank():
        for _ in range(TRIALS):
            objective()
        return epochs, []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    found = optuna.create_study(pruner=pruner)
    found.optimize(objective, n_trials=TRIALS)
    return epochs, [trial.state.name for trial in found.trials]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_pruned_trial_ends_on_both_ranks(group, forked_spawn, cwd):
    pytest.importorskip("optuna", reason="pip install optuna")
    one, two = cx.testing.run_ranks(2, study)
    assert one[0] == two[0] == [EPOCHS, 1, 1]
    assert one[1] == ["COMPLETE", "PRUNED", "PRUNED"]
