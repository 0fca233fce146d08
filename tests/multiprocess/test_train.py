"""The main job in several processes: the same losses as one process with as many devices."""

import json
from itertools import chain, zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps
from tests.support.programs import printed_by
from tests.support.sharded import assert_as_mean
from tests.support.trainers import after_fit, classes, config

pytestmark = pytest.mark.multiprocess
CONFIG = Path(__file__).parents[2] / "configs" / "digits.yaml"


def command(run_dir: Path, epochs: int = 2) -> list[str]:
    return [
        *("-m", "cyxjax.train", "--config", str(CONFIG), "--run-dir", str(run_dir)),
        *("--epochs", str(epochs), "--log-every-n-batches", "5", "--checkpoint-every-n-epochs", "1"),
        *("--model.name", "mlp"),
    ]


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "train_loss", "val_loss") if name in line]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    assert "Batch plan: 32 samples x 2 replicas" in printed_by(*command(run_dir))
    return run_dir


def test_the_launcher_gives_the_losses_of_one_process_and_saves_by_minutes_the_last_step_together(
    one_process, tmp_path
):
    # zero1: each rank writes its part of the state
    more = ["--comm", "zero1", "--checkpoint-every-n-epochs", "0", "--checkpoint-every-n-minutes", "60"]
    printed = printed_by("-m", "cyxjax.launch", "--nproc-per-node", "2", *command(tmp_path / "two"), *more)
    assert "world_size 2; backend gloo" in printed
    assert "[rank 1] Epoch" not in printed  # only rank 0 prints
    # gloo and the in-process all-reduce add the same two float32 numbers; 40 Adam steps keep them at 1e-6.
    assert losses(tmp_path / "two") == pytest.approx(losses(one_process), rel=1e-5)
    assert list_steps(tmp_path / "two" / "checkpoints") == [40]


ALIKE = [
    [["cnn", "clip-accumulation"], ["nnx", "skip"]],
    [["gpt", "bfloat16"], ["cnn", "average"]],
    [["crossed", "plain"]],
]


def as_mean(rows):
    """The processes and devices of this group, on which fsdp trains each of `rows` as `mean` does."""
    for model, settings in rows:
        assert_as_mean(model, None, settings)
    return [jax.process_count(), jax.local_device_count()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows"),
    [(1, ALIKE[0]), *(pytest.param(n, rows, marks=pytest.mark.wide) for n in (1, 2) for rows in ALIKE)],
)
def test_parameters_cut_over_two_processes_are_those_of_mean(devices, rows, forked_spawn):
    assert cx.testing.run_ranks(2, as_mean, rows, devices=devices) == [[2, devices]] * 2


def batches_of_ranks(sizes):
    """Batches of a linear regression: a list for each rank, of the sizes that it is given."""
    rng = np.random.default_rng(0)
    made = lambda size: (rng.normal(size=(size, n)).astype(np.float32) for n in (3, 1))  # noqa: E731
    return [[tuple(made(size)) for size in of_rank] for of_rank in sizes]


def trained_on_own_batches(sizes):
    batches = cx.data.Batches(batches_of_ranks(sizes)[jax.process_index()])
    linear = {"w": jnp.zeros((3, 1))}, lambda params, x: x @ params["w"]
    one = cx.DistributedTrainer(linear, cx.MSELoss(), optax.sgd(0.1))
    one.fit(batches, epochs=1, verbose=False, checkpoint_every_n_epochs=0)
    return [*np.ravel(one.params["w"]).tolist(), one.evaluate(batches)[0]]


def by_hand(sizes):
    """The same on all samples of a step together, in float64."""
    ranks, w = batches_of_ranks(sizes), np.zeros((3, 1))
    for step in zip_longest(*ranks):
        x, y = map(np.concatenate, zip(*filter(None, step), strict=True))
        w -= 0.1 * 2 * x.T @ (x @ w - y) / len(x)
    x, y = map(np.concatenate, zip(*chain(*ranks), strict=True))
    return [*w.ravel(), np.square(x @ w - y).mean()]


# Padded to its first batch, a rank can have as many rows as all ranks have samples in the step.
@pytest.mark.parametrize("sizes", [((4,), (8, 8)), ((8, 4), (12, 12))])
def test_loaders_with_batches_of_different_sizes_on_each_rank_weigh_every_sample_once(sizes, forked_spawn):
    for found in cx.testing.run_ranks(2, trained_on_own_batches, sizes):
        assert found == pytest.approx(by_hand(sizes), rel=1e-5)


def test_rerunning_a_finished_run_trains_nothing_and_raising_epochs_goes_on(one_process):
    before = losses(one_process)
    assert "All 2 epochs are done" in printed_by(*command(one_process))
    assert losses(one_process) == before
    printed = printed_by(*command(one_process, epochs=3))
    assert "Resuming from step 40 (epoch 3, sample 0)" in printed
    assert losses(one_process)[: len(before)] == before
    assert len(losses(one_process)) > len(before)


def weighed_and_compared():
    """(world size, numbers) of trainings with class weights and with a loss over the global batch."""
    (inputs, labels), found = classes(19), []
    weighed = cx.CrossEntropyLoss(weight=[1, 2, 20])
    compared = cx.GlobalLoss(lambda o, t, w: ((o - (o.T @ w / w.sum())) ** 2).sum(-1) - 0.1 * o[:, 0])
    for loss in (weighed, compared):
        options = config(batch_size=None, global_batch_size=8)
        one = after_fit(inputs, labels, options, model=linen.Dense(3), loss=loss, lr=0.01)
        sums = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(one.params)]
        found += [*one.history.train_losses, one.evaluate(inputs, labels)[0], *sums]
    return one.history.world_size, found


@pytest.mark.slow
def test_losses_that_weigh_or_compare_samples_are_those_of_one_process(forked_spawn):
    (one,), (two, other) = (cx.testing.run_ranks(ranks, weighed_and_compared) for ranks in (1, 2))
    assert (one[0], two[0], other) == (1, 2, two)
    assert two[1] == pytest.approx(one[1], rel=1e-4)  # sums in a different order, six steps
