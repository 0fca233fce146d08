"""The callbacks of one rank: what they answer counts on all, wherever they are asked."""

import pytest

import cyxjax as cx
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.stop_reasons import CALLBACK, MAX_TIME, SIGNAL
from cyxjax.train.hooks.callbacks import EarlyStopping
from cyxjax.train.hooks.composite import CompositeCallback, hooks_of
from cyxjax.train.hooks.hook import EpochInfo, Hook, Position, RunState, StepInfo
from cyxjax.train.hooks.saving import StopHook
from tests.support.trainers import X, Y, config, trainer

STEP = StepInfo(Position(7), None, (0.0, 0.0))
EPOCH = EpochInfo(Position(8, 1), {}, {})
MOMENT = RunState(Position(8, 1), None, None)


def says(*names, answer=True):
    """A callback of the user's that answers so at these moments."""
    return type("Says", (cx.Callback,), {name: lambda self, value: answer for name in names})()


def joined(*hooks, others=False, calls=None):
    """Hooks of a rank; `others`: what the other rank says."""
    history, calls = DistributedTrainingHistory(), [] if calls is None else calls
    any_rank = lambda *call: calls.append(call) or call[1] or others  # noqa: E731
    return CompositeCallback(list(hooks), history, any_rank), history


@pytest.mark.parametrize(
    ("name", "value"), [("on_start", MOMENT), ("on_epoch", EPOCH), ("on_evaluation", EPOCH)]
)
def test_what_one_rank_says_outside_of_steps_counts_on_all(name, value):
    no = says(name, answer=False)
    for mine, theirs in ((True, False), (False, True)):
        hook, history = joined(no, says(name, answer=mine), others=theirs, calls=(calls := []))
        assert getattr(hook, name)(value)
        assert history.stopped_by == "callback"
        assert calls == [(f"{name} of the callbacks, after step 8", mine)]  # one exchange for all hooks
    hook, history = joined(no, no)
    assert not getattr(hook, name)(value)
    assert history.stopped_by == ""


def test_what_one_rank_says_at_a_step_is_sent_along_and_stops_none_alone():
    hook, history = joined(says("on_step"), calls=(calls := []))
    assert hook.ask() == (0.0, False)
    assert not hook.on_step(STEP)
    assert (calls, history.stopped_by) == ([], "")
    assert hook.ask() == (CALLBACK.sent, False)
    assert hook.on_epoch(EPOCH)  # where no step was left to send it with


def test_a_wish_of_a_callbacks_own_is_no_signal():
    class Asks(Hook):
        def ask(self):
            return True, True

    assert joined(Asks())[0].ask() == (CALLBACK.sent, True)


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        ((CALLBACK.sent,) * 3, "callback"),
        ((CALLBACK.sent, MAX_TIME.sent), "max_time"),
        ((MAX_TIME.sent, SIGNAL.sent), "signal"),
    ],
)
def test_the_strongest_reason_of_all_ranks_is_told(wishes, reason):
    history = DistributedTrainingHistory()
    StopHook(history, lambda: False, None).on_step(STEP._replace(signals=(sum(wishes), 0.0)))
    assert history.stopped_by == reason


def test_states_go_through_the_hooks_that_want_them():
    class Wants(Hook):
        def __init__(self, at):
            self._at = at

        def wants_state(self, position, asked_to_save):
            return position.step == self._at

        def on_state(self, moment):
            return (moment.state or 0) + self._at

        def next_state(self, info, state):
            return state + [self._at]

    hook = joined(Wants(8), Wants(9), Wants(8))[0]
    assert not hook.wants_state(Position(7), False)
    assert hook.wants_state(Position(8), False)
    assert hook.on_state(MOMENT) == 16  # 8 given back twice, the second on top of the first
    assert hook.next_state(EPOCH, []) == [8, 9, 8]


def test_no_rank_is_asked_for_hooks_that_are_ours_or_say_nothing():
    for quiet in ([EarlyStopping(1)], [says("wants_state"), EarlyStopping(1)], []):
        assert hooks_of(quiet, DistributedTrainingHistory(), None, None) == quiet
    (one,) = hooks_of([EarlyStopping(1), says("on_step")], DistributedTrainingHistory(), None, None)
    assert isinstance(one, CompositeCallback)


@pytest.mark.usefixtures("two_devices")
def test_a_run_that_a_callback_ended_says_so():
    history = trainer(callbacks=[says("on_step")]).fit(X, Y, config(batch_size=1, steps_per_dispatch=1))
    # Told of steps 1 to 4 when 8 are under way; sent along with step 9, which is told of at step 16 of 30.
    assert (history.stopped_by, history.num_steps, history.train_losses) == ("callback", 16, [])
