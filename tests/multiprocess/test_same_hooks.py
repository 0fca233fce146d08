"""All ranks call the hooks on the state together: a save by one rank alone would wait for the others."""

import time
from unittest import mock

import pytest

import cyxjax as cx

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
ON_STATES = ("saves_at", "wants_state", "on_state", "next_state")
SETTINGS = (
    {"checkpoint_every_n_epochs": 1},
    {"checkpoint_every_n_minutes": 1e-9, "comm": "zero1"},
    {"checkpoint_every_n_steps": 3, "comm": "fsdp", "keep_best": 1, "early_stopping_patience": 1},
    {"sentinel_every_n_steps": 2, "on_desync": "heal", "checkpoint_every_n_epochs": 0},
    {"on_nonfinite": "rollback", "on_loss_spike": "rollback"},
    {"comm": "local_sgd", "evaluate_every_n_steps": 2, "checkpoint_every_n_steps": 2},
    {
        "reproducibility": "exact",
        "global_batch_size": 16,
        "batch_size": None,
        "exact_digest_every_n_steps": 2,
    },
)


def answers(hook):
    """Class; whether it saves, wants the state, wants it with a save, by step; whether it asks to save."""
    from cyxjax.train.hooks.hook import Position

    places = [Position(step, step // 2, 0, step % 2) for step in range(1, 9)]
    time.sleep(0.001)  # longer than an interval of saves
    saves = [hook.saves_at(place) for place in places]
    wants = [[hook.wants_state(place, saving) for place in places] for saving in (False, True)]
    return [type(hook).__name__, saves, *wants, hook.ask()[1]]


def all_answers(folder):
    """The answers of each hook on the state, by settings."""
    from cyxjax.train import run
    from cyxjax.train.hooks.hook import overriding
    from tests.support.trainers import VAL, X, Y, config, trainer

    found, made = [], run.build_hooks

    def recorded(*of_fit):
        hooks = made(*of_fit)
        found.append([answers(hook) for hook in overriding(hooks, *ON_STATES)])
        return hooks

    with mock.patch.object(run, "build_hooks", recorded):
        for number, settings in enumerate(SETTINGS):
            trainer().fit(X, Y, *VAL, config(**settings), run_dir=f"{folder}/{number}", profile="1:2")
    return found


def test_every_rank_has_the_hooks_that_act_on_the_state_and_they_want_it_at_the_same_steps(
    tmp_path, forked_spawn
):
    first, other = cx.testing.run_ranks(2, all_answers, str(tmp_path))
    assert len(first) == len(SETTINGS)
    assert {name for hooks in first for name, *_ in hooks} >= {"CheckpointHook", "SentinelHook", "DigestHook"}
    assert other == first
