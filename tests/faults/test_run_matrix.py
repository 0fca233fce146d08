"""Other faults of a whole run: replicas that diverge, numbers that are not finite, folders in use."""

import numpy as np
import pytest

from cyxjax.cli import audit, main
from cyxjax.errors import EXIT_CONFIG, EXIT_OK, EXIT_SECONDARY, EXIT_USER_ERROR
from tests.support import jobs
from tests.support.launching import until
from tests.support.training import curves, newest_step, write_experiment

pytestmark = pytest.mark.multiprocess


def test_a_bit_that_flips_on_one_rank_is_named_by_all(tmp_path):
    config = write_experiment(tmp_path, sentinel_every_n_steps=500)
    ended = jobs.run(config, world=2, fault="FLIP:1:bit:8", code=None)
    # A slow rank receives the other's error, in the same words, before its own comparison.
    assert {EXIT_USER_ERROR} <= set(ended.codes) <= {EXIT_USER_ERROR, EXIT_SECONDARY}
    assert ended.text.count("Gradients differ across ranks: after step 8 params/") == 2
    assert "on rank 1 (replica 1) is not what rank 0 holds" in ended.text
    assert newest_step(config) == 4  # the save of step 8 was not made


def test_a_sample_that_overflows_and_a_spike_of_the_loss_are_left_out_by_all(tmp_path, capsys):
    spikes = {"loss_spike_window": 3, "loss_spike_factor": 3.0, "loss_spike_steps": 1}
    saves = {"checkpoint_every_n_steps": 1, "keep_last": 5, "shuffle": False, "on_nonfinite": "skip"}
    config = write_experiment(tmp_path, on_loss_spike="rollback", **spikes, **saves)
    arrays = dict(np.load(tmp_path / "data.npz", allow_pickle=False))
    arrays["x_train"][5] = 3e38  # of the first step, on one rank
    # Two samples of the fifth step, equal except for their labels: one is far off for any model.
    arrays["x_train"][70:72] = 1e4
    arrays["y_train"][70:72] = 0, 1
    np.savez(tmp_path / "data.npz", **arrays)
    ended = jobs.run(config, world=2)
    assert ended.text.count("WARNING: the loss was") == 3, ended.text  # once per epoch, on rank 0
    assert np.isfinite(curves(config)["train_losses"]).all()
    assert max(curves(config)["train_losses"]) < 3  # ln 3 is the loss of guessing
    assert '"skipped_steps": 3' in (tmp_path / "run" / "history.json").read_text()  # once per epoch
    assert len(list((tmp_path / "run").glob("black_box_step*"))) == 3
    assert audit.main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("left out on purpose: a rollback") == 3


def test_a_run_folder_has_one_job_and_a_dead_one_s_is_taken_over(tmp_path):
    config = write_experiment(tmp_path)
    (first,) = jobs.start(config, fault=f"STALL:0:step:6:{jobs.LIMIT_S}")
    assert until(lambda: newest_step(config) >= 4, 90)
    second = tmp_path / "second.yaml"
    second.write_text(config.read_text())
    assert main.main(["checkpoint", "ls", str(tmp_path / "run")]) == EXIT_OK  # reading is allowed
    refused = jobs.run(second, code=EXIT_USER_ERROR)
    assert "is in use by" in refused.text
    assert str(first.pid) in refused.text
    first.kill()
    assert "Resuming from step" in jobs.run(second).text


def test_data_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    config = write_experiment(tmp_path)
    (tmp_path / "data.npz").unlink()
    assert "data.npz" in jobs.run(config, code=EXIT_CONFIG).text
    assert not (tmp_path / "run").exists()
