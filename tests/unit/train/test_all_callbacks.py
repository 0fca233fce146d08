"""The callbacks of one rank: their answers apply to all ranks, wherever they are called."""

import itertools

import jax
import pytest

from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.stop_reasons import CALLBACK, MAX_TIME, SIGNAL, strongest
from cyxjax.train import run
from cyxjax.train.hooks.hook import Position, StepInfo
from cyxjax.train.hooks.saving import StopHook
from tests.support.trainers import VAL, X, Y, after_fit, config, does, says, trainer


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(("name", "steps"), [("on_start", 0), ("on_epoch", 30), ("on_evaluation", 25)])
def test_what_one_rank_says_outside_of_steps_counts_on_all(name, steps, monkeypatch):
    when = f"{name} of the callbacks, after step {steps}"
    for mine, theirs in ((True, False), (False, True)):
        calls = []

        def any_rank(group, what, mine=False, theirs=theirs, calls=calls):
            calls.append((what, mine))
            return mine or theirs and what == when

        monkeypatch.setattr(run, "on_any_rank", any_rank)
        settings = config(batch_size=1, epochs=2, evaluate_every_n_steps=25)
        history = trainer(callbacks=[says(name, False), says(name, mine)]).fit(X, Y, *VAL, settings)
        assert (history.num_steps, history.stopped_by) == (steps, "callback")
        assert calls.count((when, mine)) == 1  # one exchange for all hooks


@pytest.mark.usefixtures("two_devices")
def test_a_run_that_a_callback_ended_at_a_step_says_so():
    calls, settings = itertools.count(1), config(batch_size=1, steps_per_dispatch=1)
    for callback in (says("on_step"), does(ask=lambda self: (next(calls) == 9, False))):
        history = trainer(callbacks=[callback]).fit(X, Y, settings)
        # Steps 1 to 4 are reported when 8 are dispatched; the request goes with step 9, read at step 16.
        assert (history.stopped_by, history.num_steps, len(history.train_losses)) == ("callback", 16, 1)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ((CALLBACK.sent,) * 3, "callback"),
        ((CALLBACK.sent, MAX_TIME.sent), "max_time"),
        ((MAX_TIME.sent, SIGNAL.sent), "signal"),
    ],
)
def test_the_strongest_reason_of_all_ranks_is_told(requests, reason):
    history = DistributedTrainingHistory()
    hook = StopHook(history, lambda: None, None)
    hook.on_step(StepInfo(Position(7), None, (sum(requests), 0.0)))
    assert history.stopped_by == reason
    assert strongest(hook.ask()[0]).name == reason  # a rollback may come before the stop


@pytest.mark.usefixtures("two_devices")
def test_a_state_that_a_callback_gives_back_is_seen_by_the_next_one_and_trained_on():
    def zero(self, moment):
        return moment.state._replace(params=jax.tree.map(lambda leaf: 0 * leaf, moment.state.params))

    seen, at_30 = [], {"wants_state": lambda self, position, saving: position.step == 30}
    sees = does(on_state=lambda self, moment: seen.extend(jax.tree.leaves(moment.state.params)), **at_30)
    one = after_fit(X, Y, config(batch_size=1, epochs=1), callbacks=[does(on_state=zero, **at_30), sees])
    assert seen
    assert not any(leaf.any() for leaf in seen)
    assert not any(leaf.any() for leaf in jax.tree.leaves(one.params))
