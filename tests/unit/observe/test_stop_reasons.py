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
def test_the_strongest_wish_is_known_from_the_sum_over_replicas(replicas):
    assert strongest(SIGNAL.sent) is SIGNAL
    assert strongest(SIGNAL.sent + replicas * INTERRUPT.sent) is SIGNAL
    assert strongest(replicas * MAX_TIME.sent) is MAX_TIME
    assert strongest(replicas * CALLBACK.sent) is CALLBACK
    assert strongest(SIGNAL.sent + replicas * MAX_TIME.sent) is SIGNAL


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
