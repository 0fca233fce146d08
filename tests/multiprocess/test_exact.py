"""`reproducibility: exact` through the command line and our launcher gives the bits of one process.

Runs that are killed and go on at another world size: tests/faults/test_exact.py.
"""

import json
from pathlib import Path

import pytest

from cyxjax.checkpoint.folders import list_steps
from cyxjax.cli.checkpoint import run_of
from cyxjax.cli.hash import first_other_state
from tests.multiprocess.test_train import CONFIG
from tests.support.programs import printed_by
from tests.support.training import assert_same_hashes

pytestmark = pytest.mark.multiprocess
WIDE = (pytest.mark.slow, pytest.mark.wide, pytest.mark.timeout(900))


def command(run_dir: Path, *options: str, devices: int = 1) -> list[str]:
    """Two epochs of a few steps with a ragged last batch; a CNN with dropout, Adam, clipping, evaluation."""
    return [
        *("-m", "cyxjax.train", "--config", str(CONFIG), "--run-dir", str(run_dir), "--epochs", "2"),
        *("--reproducibility", "exact", "--global-batch-size", "256", "--cpu-devices", str(devices)),
        *("--checkpoint-every-n-steps", "2", "--keep-last", "99", "--max-grad-norm", "1.0"),
        *("--model.options.dropout", "0.2", "--exact-digest-every-n-steps", "1"),
        *options,
    ]


def train(run_dir: Path, processes: int, *options: str, devices: int = 1, **variables: str) -> None:
    launcher = ["-m", "cyxjax.launch", "--nproc-per-node", str(processes)] if processes > 1 else []
    printed_by(*launcher, *command(run_dir, *options, devices=devices), **variables)


# With LLVM's passes, which contract and reorder: they expose faults other than the order of sums.
AS_USERS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of one process, compiled as for users."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train(run_dir, 1, **AS_USERS)
    return run_dir


@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        pytest.param(3, 3, marks=pytest.mark.slow),  # one device per process: --cpu-devices is divided
        pytest.param(2, 4, marks=WIDE),
        pytest.param(1, 5, marks=WIDE),
    ],
)
def test_any_processes_and_devices_leave_the_bits_of_one(alone, tmp_path, processes, devices):
    train(tmp_path / "run", processes, devices=devices, **AS_USERS)
    assert_same_hashes(alone, tmp_path / "run")
    last = list_steps(alone / "checkpoints")[-1]
    runs = run_of(alone), run_of(tmp_path / "run")
    assert first_other_state(*runs)[0] == f"equal: digests of {last} steps, the last {last}"


@pytest.mark.slow
def test_the_canary_sees_other_threads():
    # the control: one program, one processor, a different number of threads (a GPT; smaller sums are equal)
    program = (
        "import json, sys, cyxjax as cx; from tests.support.exact import config, problem; "
        "from cyxjax.train.trainer import DistributedTrainer; "
        "cx.distributed.init(threads=int(sys.argv[1])); one = problem('gpt'); "
        "trainer = DistributedTrainer(one.model, cx.CrossEntropyLoss(), cx.SGDOptimizer(0.01)); "
        "options = config(global_batch_size=64, virtual_replicas=2, exact_threads=int(sys.argv[1])); "
        "trainer.prepare(one.data, config=options); print(json.dumps(trainer.plan.facts.exact))"
    )
    outputs = [printed_by("-c", program, threads, **AS_USERS) for threads in ("2", "8")]
    two, eight = (json.loads(printed.splitlines()[-1]) for printed in outputs)
    assert two["canary"] != eight["canary"]
    assert (two["machine"][-9:], eight["machine"][-9:]) == ("2 threads", "8 threads")
