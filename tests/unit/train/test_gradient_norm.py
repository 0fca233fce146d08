"""The norm of the mean gradients: in records, history and checkpoints, where there is a mean."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.metrics import Metrics
from cyxjax.observe.console import NullConsole
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.train.hooks.hook import EpochInfo, Position, RunState, StepInfo
from cyxjax.train.hooks.progress import HistoryHook, RecordHook
from tests.support.trainers import Line, config, trainer

pytestmark = pytest.mark.usefixtures("two_devices")

ONE_X, ONE_Y = np.float32([[3.0, 4.0]]), np.float32([10.0])


def test_every_eighth_step_tells_the_norm_of_its_gradient_before_clipping():
    # loss = (3 w1 + 4 w2 + b - 10)^2: its gradient is 2 (y - 10) (3, 4, 1), of norm 2 |y - 10| sqrt(26).
    one = trainer(Line(), cx.MSELoss(), 0.01)
    history = one.fit(ONE_X, ONE_Y, config(epochs=9, max_grad_norm=0.5))
    wanted = {epoch: 2 * math.sqrt(26 * history.train_losses[epoch]) for epoch in (0, 8)}
    assert history.grad_norms == pytest.approx([*wanted.values()], rel=1e-5)
    norms = {row["epoch"]: row["grad_norm"] for row in history.rows() if "grad_norm" in row}
    assert norms == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("comm", ["local_sgd", "diloco"])
def test_without_a_mean_gradient_nothing_is_told(comm):
    history = trainer(Line(), cx.MSELoss(), 0.01).fit(ONE_X, ONE_Y, config(comm=comm))
    assert history.train_losses
    assert not history.grad_norms


def test_a_record_has_the_mean_of_the_norms_since_the_last_one_and_none_where_none_was_known():
    records: list = []
    parts = NullConsole(), SimpleNamespace(log=records.append), Metrics()
    hook = RecordHook(*parts, every=2, learning_rate=lambda step: None, total_seconds=lambda: 1.5)
    hook.on_start(RunState(Position(), None, None))
    norms = [(3.0, 1.0), (5.0, 1.0), (7.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]  # (0, 0): left out
    for step, norm in enumerate(norms, 1):
        sums = np.array([[2.0, 4.0], [1.0, 4.0], norm])
        hook.on_step(StepInfo(Position(step, 0, 4 * step, step), sums, (0.0, 0.0)))
    assert [record.get("grad_norm") for record in records] == [4.0, 7.0, None]
    assert all("grad_norm" not in record or record["loss"] == 0.5 for record in records)
    assert all("learning_rate" not in record for record in records)  # it is unknown


def test_an_epoch_without_a_norm_leaves_the_others_in_their_places():
    # of an older version
    history = DistributedTrainingHistory(epochs=[0], train_losses=[1.0], train_accuracies=[0.5])
    hook = HistoryHook(history, lambda step: None)
    for epoch, norm in ((2, {}), (3, {"grad_norm": 2.0})):
        hook.on_epoch(EpochInfo(Position(epoch, epoch), {"loss": 1.0, "accuracy": 0.5, **norm}, {}))
    assert [row.get("grad_norm") for row in history.rows()] == [None, None, 2.0]
    assert not history.metrics
