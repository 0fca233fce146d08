"""A metrics tracker that is slow, or never answers, in a whole training: nothing waits for it but its end."""

import pytest

from cyxjax.errors import EXIT_OK
from cyxjax.observe.file_sinks import read_jsonl
from tests.support.training import EPOCHS, STEPS_PER_EPOCH, Jobs, newest_step, write_experiment

pytestmark = pytest.mark.multiprocess
SINKS = {"sinks": ["jsonl", "wandb"]}


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


def step_times(config):
    """Seconds that steps and all they waited for took, of the run's own account."""
    (record,) = (r for r in read_jsonl(config.parent / "run" / "metrics.jsonl") if "seconds_step" in r)
    return record["seconds_step"]


def test_r40_a_tracker_that_never_answers_is_left_behind_with_one_warning(jobs, tmp_path):
    config = write_experiment(tmp_path, **SINKS)
    ended = jobs.run(config, fault="SINK:0:1000:0")  # one write alone would take longer than a job may
    assert ended.codes == [EXIT_OK], ended.text
    assert newest_step(config) == EPOCHS * STEPS_PER_EPOCH
    assert ended.text.count("WARNING") == ended.text.count("WARNING: metrics sink wandb") == 1
    # 18 steps, 3 epochs, goodput, test results and samples are 24; the first was begun
    assert "left behind, with 23 records not begun" in ended.text


def test_r40_a_slow_tracker_gets_all_records_after_training_that_did_not_wait(jobs, tmp_path):
    config = write_experiment(tmp_path, **SINKS)
    ended = jobs.run(config, fault="SINK:0:0.8:0")
    assert ended.codes == [EXIT_OK], ended.text
    assert "WARNING" not in ended.text
    assert step_times(config) < 15  # 22 writes of 0.8 s would be 17.6 s
