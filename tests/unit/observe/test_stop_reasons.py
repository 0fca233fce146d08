"""One table of stop reasons: the strongest request of all ranks, and the command that continues."""

import pytest

from cyxjax.config.experiment import TrainConfig
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.stop_reasons import (
    CALLBACK,
    EPOCHS,
    INTERRUPT,
    MAX_TIME,
    REASONS,
    SIGNAL,
    reason_of,
    strongest,
)
from cyxjax.train.experiment import _next_commands


@pytest.mark.parametrize("replicas", [1, 7, 1_000_000])
@pytest.mark.parametrize(
    ("of_one", "of_all", "reason"),
    [
        (SIGNAL.sent, 0.0, SIGNAL),
        (SIGNAL.sent, INTERRUPT.sent, SIGNAL),
        (0.0, MAX_TIME.sent, MAX_TIME),
        (0.0, CALLBACK.sent, CALLBACK),
        (SIGNAL.sent, MAX_TIME.sent, SIGNAL),
    ],
)
def test_the_strongest_wish_is_known_from_the_sum_over_replicas(replicas, of_one, of_all, reason):
    assert strongest(of_one + replicas * of_all) is reason


@pytest.mark.parametrize("name", REASONS)
def test_more_epochs_are_offered_only_where_they_train_on(name):
    history = DistributedTrainingHistory(stopped_by=name)
    assert reason_of(name).hint not in _next_commands(TrainConfig(), history, False)
    message = _next_commands(TrainConfig(), history, True)
    assert reason_of(name).hint in message
    assert ("--epochs" in message) is (name == "")


def test_a_name_of_another_version_is_shown_as_it_is():
    assert reason_of("sunset").note == "sunset"
    assert reason_of("") is EPOCHS
