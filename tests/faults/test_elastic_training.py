"""The trainer on hosts that come and go: it resumes at every size, and the ledger proves what it saw."""

import pytest

from cyxjax.cli.audit import main as audit
from cyxjax.data.audit import surviving
from cyxjax.data.ledger_file import read_entries
from tests.support.elastic_hosts import Hosts, two_then_one_then_two
from tests.support.training import SAMPLES, STEPS_PER_EPOCH, newest_step, write_experiment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
EPOCHS, SAVE_EVERY = 120, 30


@pytest.fixture
def config(tmp_path):
    """Long enough for hosts to come and go: 11 s on two hosts of one core each."""
    return write_experiment(
        tmp_path,
        cpu_devices=1,
        epochs=EPOCHS,
        checkpoint_every_n_steps=SAVE_EVERY,
        checkpoint_every_n_epochs=EPOCHS,
        log_every_n_batches=1000,
        model={"name": "mlp", "options": {"hidden": [256, 256], "dropout": 0.2}},
    )


@pytest.fixture
def hosts(tmp_path, config):
    made = Hosts(tmp_path / "hosts", "1:2", "-m", "cyxjax.train", "--config", str(config), fork=True)
    yield made
    made.close()


def test_two_hosts_then_one_then_two_see_every_sample_once_an_epoch(hosts, config, capsys):
    first = two_then_one_then_two(hosts, lambda: newest_step(config), 2 * SAVE_EVERY)
    for start, size in enumerate((2, 1, 2)):
        assert f"{16 // size} samples x {size} replicas" in first.log(0, start)
    assert "start 3" not in first.err
    assert audit([str(config.parent / "run")]) == 0, capsys.readouterr().out
    kept = surviving(read_entries(config.parent / "run" / "ledger.jsonl"))
    assert (len(kept), kept[-1].ledger.samples) == (EPOCHS * STEPS_PER_EPOCH, EPOCHS * SAMPLES)
