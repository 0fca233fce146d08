"""Things only one rank has: a callback that stops all ranks, a mirror, a loop that it leaves early."""

import jax
import pytest

import cyxjax as cx
from tests.support import forked
from tests.support.programs import environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def stopped(rank):
    """(steps done, stop reason) of fits, each ended at another point by a callback that only `rank` has."""
    from tests.support.trainers import VAL, X, Y, config, says, trainer

    found = []
    for where in ("on_start", "on_step", "on_epoch", "on_evaluation"):
        one = trainer(callbacks=[says(where)] if cx.distributed.get_rank() == rank else [])
        history = one.fit(
            X, Y, *VAL, config(batch_size=1, epochs=2, evaluate_every_n_steps=25, steps_per_dispatch=1)
        )
        found.append([history.num_steps, history.stopped_by])
    return found


def test_a_callback_that_stops_one_rank_stops_all_at_the_step_where_one_process_does(forked_spawn):
    # Results arrive when 8 more steps are queued; the request travels with step 9, whose result arrives at
    # step 16: as in tests/unit/train/test_all_callbacks.py.
    wanted = [[0, "callback"], [16, "callback"], [30, "callback"], [25, "callback"]]
    assert cx.testing.run_ranks(2, stopped, 1) == [wanted, wanted]


def seen_on(rank):
    """(steps done, different values of a model that holds its values, seen at the ends of epochs) under each
    strategy, where only `rank` has a callback."""
    from tests.support.trainers import X, Y, config, does, mlp, trainer

    found = []
    for comm in ("mean", "fsdp"):
        model, seen = mlp(), set()
        sees = does(on_epoch=lambda *_: seen.add(float(jax.tree.leaves(model.parameters())[0].sum())))  # noqa: B023
        one = trainer(model, callbacks=[sees] if cx.distributed.get_rank() == rank else [])
        history = one.fit(X, Y, config(epochs=2, comm=comm))
        found.append([history.num_steps, len(seen)])
    return found


def test_a_callback_that_one_rank_alone_has_sees_the_values_of_the_model(forked_spawn):
    assert cx.testing.run_ranks(2, seen_on, 0) == [[[16, 2], [16, 2]], [[16, 0], [16, 0]]]


def mirrored(folder, rank):
    """Steps done by two fits where only `rank` has a mirror, the second in an empty folder; then whether the
    store of this process has a copy."""
    import fsspec

    from cyxjax.config.experiment import TrainConfig
    from tests.support.trainers import QUIET, X, Y, trainer

    url = "memory://one_rank/run" if cx.distributed.get_rank() == rank else None
    found = []
    for name, resume in (("a", "auto"), ("b", "must" if rank == 0 else "auto")):
        values = QUIET | {"checkpoint_every_n_epochs": 1, "epochs": len(found) + 1, "resume": resume}
        one = trainer()
        one.fit(X, Y, config=TrainConfig(run_dir=f"{folder}/{name}", mirror=url, **values))
        found.append(one.history.num_steps)
    return [*found, fsspec.filesystem("memory").exists("one_rank/run")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mirror_that_the_first_rank_alone_was_given_is_that_of_the_run_and_no_other_rank_s(
    tmp_path, forked_spawn, rank
):
    assert cx.testing.run_ranks(2, mirrored, str(tmp_path), rank) == [[8, 16, rank == 0], [8, 16, False]]


LEAVES = """
import jax, numpy as np
from flax import linen
import cyxjax as cx

cx.distributed.init()
x, y = np.ones((4, 3), np.float32), np.zeros(4, np.int32)
net = linen.Dense(2)
ddp = cx.distributed.DistributedDataParallel(MODEL)
optimizer, loss = cx.SGDOptimizer(0.1), cx.CrossEntropyLoss()
for step in range(4):
    if step == 2 and cx.distributed.get_rank() == 1:
        break
    ddp.loss(loss, ddp(x), y).backward()
    ddp.update_parameters(optimizer)
"""


@pytest.mark.parametrize("model", ["net", "net.bind(net.init(jax.random.key(0), x))"])
def test_a_loop_that_one_rank_leaves_is_ended_and_named(model, tmp_path):
    """Also if the model holds no values, which would be read after each step."""
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES.replace("MODEL", model))
    words = ["-m", "cyxjax.launch", "--nproc-per-node", "2", "--log-dir", str(tmp_path), str(program)]
    done = forked.run(words, environment(), 120)
    assert done.returncode == 1, done.stderr
    assert (
        "EarlyEnd: rank 1 finished at step 1, but rank 0 cannot continue without it in step 2" in done.stderr
    )
    assert "step 2, collective" in done.stderr
    assert "from leaves.py:" in done.stderr
