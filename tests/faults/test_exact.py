"""`reproducibility: exact` with kills, each time at a new world size: the bits of a run without kills."""

from contextlib import closing

import pytest

from cyxjax.cli.audit import main as audit
from cyxjax.data.ledger import walk
from cyxjax.data.ledger_file import read_ledger
from tests.support import jobs
from tests.support.elastic_hosts import Hosts, two_then_one_then_two
from tests.support.programs import printed_by
from tests.support.training import (
    DROPPING,
    SAMPLES,
    STEPS_PER_EPOCH,
    assert_same_hashes,
    newest_step,
    write_experiment,
)

pytestmark = pytest.mark.multiprocess
EXACT = DROPPING | {"reproducibility": "exact", "keep_last": 99}
HOST_EPOCHS, SAVE_EVERY = 100, 30


@pytest.mark.parametrize(
    ("kills", "world"),
    [
        ([(2, "KILL:1:step:6")], 1),
        pytest.param(
            [(1, "KILL:0:write:4"), (3, "KILL:1:eval:6"), (2, "KILL:0:write:12")], 2, marks=pytest.mark.slow
        ),
    ],
    ids=["in a step", "in saves and an evaluation"],
)
def test_killed_and_finished_by_another_number_of_processes(tmp_path, kills, world):
    whole, config = (write_experiment(tmp_path / name, **EXACT) for name in ("whole", "broken"))
    jobs.run(whole)
    for killed_in, fault in kills:
        assert -9 in jobs.run(config, world=killed_in, fault=fault, code=None).codes
    ended = jobs.run(config, world=world)
    assert "Resuming from step" in ended.text
    assert "WARNING" not in ended.text  # the data fingerprints agree
    assert_same_hashes(config.parent / "run", whole.parent / "run")


@pytest.mark.slow
def test_hosts_that_come_and_go_leave_the_bits_of_an_unbroken_run(tmp_path, capsys):
    options = EXACT | {
        "cpu_devices": 1,
        "epochs": HOST_EPOCHS,
        "checkpoint_every_n_steps": SAVE_EVERY,
        "checkpoint_every_n_epochs": HOST_EPOCHS,
        "log_every_n_batches": 1000,
        "model": {"name": "mlp", "options": {"hidden": [256, 256], "dropout": 0.2}},
    }
    whole, config = (write_experiment(tmp_path / name, **options) for name in ("whole", "broken"))
    printed_by("-m", "cyxjax.train", "--config", whole)
    words = ("-m", "cyxjax.train", "--config", str(config))
    with closing(Hosts(tmp_path / "hosts", "1:2", *words, fork=True)) as hosts:
        first = two_then_one_then_two(hosts, lambda: newest_step(config), 2 * SAVE_EVERY)
    for start, size in enumerate((2, 1, 2)):
        assert f"= 16 per step; world_size {size};" in first.log(0, start)
    assert "start 3" not in first.err
    assert_same_hashes(config.parent / "run", whole.parent / "run")
    assert audit([str(config.parent / "run")]) == 0, capsys.readouterr().out
    end = [*walk(read_ledger(config.parent / "run" / "ledger.jsonl").records)][-1].after
    assert (end.steps, end.samples) == (HOST_EPOCHS * STEPS_PER_EPOCH, HOST_EPOCHS * SAMPLES)
