"""What one rank's callbacks say alone: all ranks stop at one step, wherever it was said."""

import pytest

import cyxjax as cx

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Says(cx.Callback):
    """Stops at `where`, on one rank."""

    def __init__(self, where, mine):
        self._where, self._mine = where, mine

    def on_start(self, moment):
        return self._mine and self._where == "on_start"

    def on_step(self, info):
        return self._mine and self._where == "on_step" and info.position.step >= 2

    def on_epoch(self, info):
        return self._mine and self._where == "on_epoch"

    def on_evaluation(self, info):
        return self._mine and self._where == "on_evaluation"


def stopped(rank):
    """(steps done, why stopped) of fits that `rank`'s callback ends, at each place."""
    from tests.support.trainers import VAL, X, Y, config, trainer

    found = []
    for where in ("on_start", "on_step", "on_epoch", "on_evaluation"):
        one = trainer(callbacks=[Says(where, cx.distributed.get_rank() == rank)])
        history = one.fit(X, Y, *VAL, config(batch_size=1, epochs=2, evaluate_every_n_steps=25))
        found.append([history.num_steps, history.stopped_by])
    return found


def test_a_callback_that_stops_one_rank_stops_all_at_the_step_where_one_process_does():
    # Step 2 is told of at step 8; the wish goes along with step 9, which is told of at step 16: as in
    # tests/unit/train/test_joined.py.
    wanted = [[0, "callback"], [16, "callback"], [30, "callback"], [25, "callback"]]
    assert cx.testing.run_ranks(2, stopped, 1) == [wanted, wanted]
