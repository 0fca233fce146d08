"""The norm of the mean gradients: in records, history and checkpoints, where there is a mean."""

import json
import math

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.metrics import Metrics
from cyxjax.observe.console import NullConsole
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.lines import RunLines
from cyxjax.observe.records import Record
from cyxjax.train import resume
from cyxjax.train.hooks.hook import EpochInfo, Position, RunState, StepInfo
from cyxjax.train.hooks.progress import HistoryHook, RecordHook
from tests.support.trainers import Line, config, own_group  # noqa: F401

ONE_X, ONE_Y = np.float32([[3.0, 4.0]]), np.float32([10.0])


def line_trainer():
    return cx.distributed.DistributedTrainer(Line(), cx.MSELoss(), cx.SGDOptimizer(0.01))


def test_every_eighth_step_tells_the_norm_of_its_gradient_before_clipping():
    # loss = (3 w1 + 4 w2 + b - 10)^2: its gradient is 2 (y - 10) (3, 4, 1), of norm 2 |y - 10| sqrt(26).
    one = line_trainer()
    history = one.fit(ONE_X, ONE_Y, config(epochs=9, max_grad_norm=0.5))
    wanted = {epoch: 2 * math.sqrt(26 * history.train_losses[epoch]) for epoch in (0, 8)}
    assert history.grad_norms == pytest.approx([*wanted.values()], rel=1e-5)
    told = {row["epoch"]: row["grad_norm"] for row in history.rows() if "grad_norm" in row}
    assert told == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("comm", ["local_sgd", "diloco"])
def test_without_a_mean_gradient_nothing_is_told(comm):
    history = line_trainer().fit(ONE_X, ONE_Y, config(comm=comm))
    assert history.train_losses
    assert not history.grad_norms


class Kept:
    def __init__(self):
        self.records: list[Record] = []

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None: ...


def test_a_record_has_the_mean_of_the_norms_since_the_last_one_and_none_where_none_was_known():
    sink = Kept()
    hook = RecordHook(
        NullConsole(), sink, Metrics(), every=2, learning_rate=lambda step: None, total_seconds=lambda: 1.5
    )
    norms = [(3.0, 1.0), (5.0, 1.0), (7.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]  # (0, 0): left out
    for step, norm in enumerate(norms, 1):
        sums = np.array([[2.0, 4.0], [1.0, 4.0], norm])
        hook.on_step(StepInfo(Position(step, 0, 4 * step, step), sums, (0.0, 0.0)))
    assert [record.get("grad_norm") for record in sink.records] == [4.0, 7.0, None]
    assert all("grad_norm" not in record or record["loss"] == 0.5 for record in sink.records)
    assert all("learning_rate" not in record for record in sink.records)  # it is not known


def test_an_epoch_without_a_norm_leaves_the_others_in_their_places():
    history = DistributedTrainingHistory(
        epochs=[0], train_losses=[1.0], train_accuracies=[0.5]
    )  # an older one
    hook = HistoryHook(history, lambda step: None)
    for epoch, norm in ((2, {}), (3, {"grad_norm": 2.0})):
        hook.on_epoch(EpochInfo(Position(epoch, epoch), {"loss": 1.0, "accuracy": 0.5, **norm}, {}))
    assert [row.get("grad_norm") for row in history.rows()] == [None, None, 2.0]
    assert not history.metrics


def test_a_checkpoint_in_mid_epoch_keeps_the_sum():
    sums = np.array([[2.0, 4.0], [1.0, 4.0], [3.5, 2.0]])
    moment = RunState(Position(2, 0, 8, 2), None, sums)  # type: ignore[arg-type]
    one = line_trainer()
    plan = one.prepare(ONE_X, ONE_Y, config=config())
    meta = resume.to_meta(plan, one._run, moment)
    again = resume.from_meta(json.loads(json.dumps(meta)), None)[0]  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.sums, sums)


def test_it_stands_on_no_line():
    record = {"step": 8, "epoch": 0, "loss": 0.5, "grad_norm": 3.0, "top2": 0.25}
    assert RunLines().step_line(record, 0.0) == "Epoch 1, Batch 8, Loss: 0.5000, top2: 0.2500"
    shown = RunLines(None, 3).epoch_line({"epoch": 0, "train_grad_norm": 3.0, "train_loss": 0.5})
    assert shown == "Epoch 1/3, Loss: 0.5000"
