"""A metrics tracker that is slow or never answers in a whole training: only the end of it waits."""

import pytest

from cyxjax.checkpoint.folders import step_folder
from tests.support import jobs
from tests.support.training import EPOCHS, LAST, checkpoints, newest_step, write_experiment

pytestmark = pytest.mark.multiprocess
SINKS = {"sinks": ["jsonl", "wandb"]}
RECORDS = LAST + EPOCHS + 2  # steps, epochs, goodput and test results


def test_r40_a_tracker_that_never_answers_is_left_behind_with_one_warning(tmp_path):
    config = write_experiment(tmp_path, **SINKS)
    ended = jobs.run(config, fault=f"SINK:0:{tmp_path / 'never'}:0")
    assert newest_step(config) == LAST
    assert ended.text.count("WARNING") == ended.text.count("WARNING: metrics sink wandb") == 1
    assert f"abandoned with {RECORDS - 1} records unwritten" in ended.text  # the first was begun


def test_r40_a_slow_tracker_gets_all_records_after_training_that_did_not_wait(tmp_path):
    config = write_experiment(tmp_path, **SINKS)
    # Each write waits for the last save: a training that waited for a write would never reach it.
    ended = jobs.run(config, fault=f"SINK:0:{step_folder(checkpoints(config), LAST)}:0")
    assert "WARNING" not in ended.text
    assert ended.text.count("tracked") == RECORDS
