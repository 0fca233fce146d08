"""`steps_per_dispatch`: what callbacks see of several steps in one dispatch, and what `auto` chooses."""

import numpy as np
from flax import linen

import cyxjax as cx
from tests.support.trainers import VAL, X, Y, config, trainer


class Watches(cx.Callback):
    """Keeps the number and the loss of each step, and stops at one."""

    def __init__(self, stop_at: int = 0) -> None:
        self.seen: list[tuple[int, float]] = []
        self._stop_at = stop_at

    def on_step(self, info) -> bool:
        self.seen.append((info.position.step, float(info.sums[0, 0])))
        return info.position.step == self._stop_at


def watched(several, stop_at=0):
    watches = Watches(stop_at)
    made = trainer(callbacks=[watches])
    made.fit(X, Y, config(epochs=8, batch_size=1, steps_per_dispatch=several))
    return watches.seen, made


def test_a_callback_sees_each_step_of_epochs_that_no_dispatch_divides():
    one, _ = watched(1)
    for several in (3, "auto"):
        assert watched(several)[0] == one
    assert [step for step, _ in one] == list(range(1, 8 * 8 + 1))  # 60 samples on 8 replicas


def test_a_callback_stops_at_the_end_of_a_dispatch():
    one, _ = watched(1)
    stopped, made = watched(4, stop_at=2)
    assert stopped == one[: len(stopped)]
    assert len(stopped) < 20
    assert made.history.stopped_by == "callback"


def test_a_dispatch_ends_at_evaluations_and_at_the_last_step():
    class Evaluated(cx.Callback):
        steps: list[int] = []

        def on_evaluation(self, info):
            self.steps.append(info.position.step)

    made = trainer(callbacks=[Evaluated()])
    settings = config(epochs=8, batch_size=1, steps_per_dispatch=7, evaluate_every_n_steps=5, max_steps=23)
    assert made.fit(X, Y, *VAL, settings).num_steps == 23
    assert Evaluated.steps == [5, 10, 15, 20]


class Convolution(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.Conv(4, (3, 3))(x).reshape(len(x), -1))


def test_auto_is_several_for_short_steps_of_arrays_without_convolutions():
    def chosen(model, *data):
        return trainer(model).prepare(*data, config=config(steps_per_dispatch="auto")).steps_at_once

    assert chosen(None, X, Y) > 1
    assert chosen(None, cx.data.DataLoader((X, Y), 8, sampler=list(range(60)))) == 1
    assert chosen(Convolution(), np.zeros((16, 8, 8, 1), np.float32), np.zeros(16, np.int32)) == 1


def test_an_exact_run_has_one_step_a_dispatch():
    exact = config(steps_per_dispatch=4, reproducibility="exact", batch_size=None, global_batch_size=8)
    assert trainer().prepare(X, Y, config=exact).steps_at_once == 1
