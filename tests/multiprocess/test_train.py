"""The main job in several processes: the same losses as one process with as many devices."""

import json
from pathlib import Path

import pytest

from cyxjax.checkpoint.folders import list_steps
from tests.support import forked
from tests.support.programs import environment, free_port, printed_by

pytestmark = pytest.mark.multiprocess
CONFIG = Path(__file__).parents[2] / "configs" / "digits.yaml"


def command(run_dir: Path, epochs: int = 2) -> list[str]:
    few = ["--epochs", str(epochs), "--log-every-n-batches", "5", "--checkpoint-every-n-epochs", "1"]
    return ["-m", "cyxjax.train", "--config", str(CONFIG), "--run-dir", str(run_dir), *few]


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "train_loss", "val_loss") if name in line]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    assert "Batch plan: 32 samples x 2 replicas" in printed_by(*command(run_dir))
    return run_dir


def test_the_launcher_gives_the_losses_of_one_process_with_two_devices(one_process, tmp_path):
    words = ["-m", "cyxjax.launch", "--nproc-per-node", "2", *command(tmp_path / "two")]
    printed = printed_by(*words)
    assert "world_size 2; backend gloo" in printed
    assert "[rank 1] Epoch" not in printed  # only rank 0 prints
    # gloo and the in-process all-reduce add the same two float32 numbers; 40 Adam steps keep them at 1e-6.
    assert losses(tmp_path / "two") == pytest.approx(losses(one_process), rel=1e-5)


@pytest.mark.slow
def test_parameters_cut_over_two_processes_give_those_losses_and_go_on_whole(one_process, tmp_path):
    parts, more = tmp_path / "parts", ["--comm", "fsdp", "--model.name", "mlp"]
    printed_by("-m", "cyxjax.launch", "--nproc-per-node", "2", *command(parts, 1), *more)
    printed_by(*command(parts), "--model.name", "mlp")  # `mean`, one process
    printed_by(*command(tmp_path / "whole"), "--model.name", "mlp")
    assert losses(parts) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_a_run_that_saves_by_minutes_saves_its_last_step_together(tmp_path):
    by_minutes = ["--checkpoint-every-n-epochs", "0", "--checkpoint-every-n-minutes", "60"]
    more = ["--comm", "zero1", "--model.name", "mlp", *by_minutes]
    printed_by("-m", "cyxjax.launch", "--nproc-per-node", "2", *command(tmp_path / "run", 1), *more)
    assert list_steps(tmp_path / "run" / "checkpoints") == [20]


ALIKE = [["cnn:clip-accumulation", "nnx:skip"], ["gpt:bfloat16", "cnn:average"], ["crossed:plain"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows"),
    [(1, ALIKE[0]), *(pytest.param(n, rows, marks=pytest.mark.wide) for n in (1, 2) for rows in ALIKE)],
)
def test_parameters_cut_over_two_processes_are_those_of_mean(devices, rows):
    job = ["-m", "cyxjax.launch", "--nproc-per-node", "2", "-m", "tests.multiprocess.sharded_job", *rows]
    output = printed_by(*job, JAX_NUM_CPU_DEVICES=str(devices))
    for row in rows:
        assert f"same {row} on 2x{devices}" in output


def test_two_terminals_with_rank_and_world_size_do_the_same(one_process, tmp_path):
    port = str(free_port())
    places = [environment(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port) for rank in range(2)]
    first, other = forked.run_all([(command(tmp_path / "hand"), place) for place in places], 120)
    assert (first.returncode, other.returncode) == (0, 0), first.stderr + other.stderr
    assert "Epoch" in first.stdout
    assert "Epoch" not in other.stdout + other.stderr
    assert losses(tmp_path / "hand") == pytest.approx(losses(one_process), rel=1e-5)


def test_rerunning_a_finished_run_trains_nothing_and_raising_epochs_goes_on(one_process):
    before = losses(one_process)
    assert "All 2 epochs are done" in printed_by(*command(one_process))
    assert losses(one_process) == before
    printed = printed_by(*command(one_process, epochs=3))
    assert "Resuming from step 40 (epoch 3, sample 0)" in printed
    assert losses(one_process)[: len(before)] == before
    assert len(losses(one_process)) > len(before)


@pytest.mark.slow
def test_losses_that_weigh_or_compare_samples_are_those_of_one_process(tmp_path):
    job, found = ["-m", "tests.multiprocess.global_losses_job"], {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        printed_by("-m", "cyxjax.launch", "--nproc-per-node", ranks, *job, folder)
        found[ranks] = json.loads((folder / "found.json").read_text())
    assert (found[1].pop("world_size"), found[2].pop("world_size")) == (1, 2)
    for name, values in found[1].items():
        assert found[2][name] == pytest.approx(values, rel=1e-4)  # sums in a different order, six steps
