"""Storage faults in a whole training: disks that fill up, read-only folders, files that disappear."""

import os
import re
import subprocess

import numpy as np
import pytest

from cyxjax.errors import EXIT_SECONDARY, EXIT_USER_ERROR
from tests.support import jobs
from tests.support.launching import start
from tests.support.training import (
    LAST,
    assert_same_run,
    checkpoints,
    newest_step,
    write_experiment,
)

pytestmark = pytest.mark.multiprocess
WIDE = {"name": "mlp", "options": {"hidden": [9300]}}  # 93,000 parameters: 1.1 MB with Adam's state


@pytest.mark.root
def test_r31_training_on_a_disk_that_fills_up_goes_on_to_its_end(small_disk, tmp_path):
    changes = {"model": WIDE, "checkpoint_every_n_steps": 6}
    whole = write_experiment(tmp_path / "whole", **changes)
    config = write_experiment(small_disk, report=True, **changes)
    jobs.run(whole)
    ended = jobs.run(config, fault=f"FILL:0:write:12:{small_disk}", code=EXIT_USER_ERROR)
    last_words = ended.text.splitlines()[-1]
    assert f"The final state (step {LAST}) could not be saved in {checkpoints(config)}" in last_words
    for step in (12, LAST):
        assert f"Checkpoint step {step} was not saved" in ended.text, ended.text
    assert re.search(r"full: 1\.1 MB needed for its arrays, [0-9.]+ k?B free", ended.text), ended.text
    assert "Test: loss" in ended.text
    assert sorted(os.listdir(checkpoints(config))) == ["run.lock", "step_00000006"]
    # With space again, the same command completes the run as if it had never been interrupted.
    (small_disk / "ballast").unlink()
    ended = jobs.run(config)
    assert "Resuming from step 6" in ended.text
    assert newest_step(config) == LAST
    assert_same_run(config, whole)


@pytest.mark.root
def test_r32_a_run_folder_that_may_not_be_written_is_refused_with_its_path(small_disk, tmp_path):
    config = write_experiment(tmp_path, run_dir=str(small_disk / "run"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)  # root can write anywhere else
    ended = jobs.run(config, code=EXIT_USER_ERROR)
    assert f"CheckpointError: {small_disk / 'run'} " in ended.text
    assert "Epoch" not in ended.text


def of_images(folder):
    """(configuration of a training on 80 images of two classes, the path of one in the training set)"""
    image, images = pytest.importorskip("PIL.Image", reason="pip install pillow"), folder / "images"
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (images / name).mkdir(parents=True)
        for i in range(40):
            pixels = rng.integers(0, 256, (8, 8), np.uint8)
            image.fromarray(pixels).save(images / name / f"{i:02}.png")
    data = {"name": "image_folder", "root": str(images), "options": {"image_size": 8}}
    return write_experiment(folder, data=data), images / "cat" / "30.png"


def test_r36_a_file_that_is_cut_short_is_named_and_the_other_rank_is_told(tmp_path):
    config, spoiled = of_images(tmp_path)
    spoiled.write_bytes(spoiled.read_bytes()[:50])
    ended = jobs.run(config, world=2, code=None)
    assert sorted(ended.codes) == [EXIT_USER_ERROR, EXIT_SECONDARY], ended.text
    what = f"item 30 of ImageFiles: {spoiled}: cannot be read"  # its index in the folder, for any split
    assert f"DataError: {what}" in ended.text
    assert f"lost rank {ended.codes.index(EXIT_USER_ERROR)}" in ended.text
    assert "its process ended" not in ended.text


def test_r36_a_file_that_is_gone_is_the_launcher_s_first_error(tmp_path):
    config, spoiled = of_images(tmp_path)
    spoiled.unlink()
    spoiled.symlink_to("moved")
    run = start(tmp_path / "logs", 2, "-m", "cyxjax.train", "--config", script=config, fork=True).wait()
    assert run.code == EXIT_USER_ERROR, run.err
    assert run.first["type"] == "DataError"
    assert f"{spoiled}: cannot be read" in run.first["message"]
    assert f"DataError: item 30 of ImageFiles: {spoiled}" in run.err.splitlines()[-1]
    assert run.no_survivors_within(30)
