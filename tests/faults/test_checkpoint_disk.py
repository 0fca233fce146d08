"""A full disk, a slow one, a folder that may not be written: training goes on and people are told."""

import errno
import os
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from cyxjax.checkpoint import store
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.errors import CheckpointError

STATE = {"w": np.random.default_rng(0).random(300_000, np.float32)}  # 1.2 MB that does not compress


def fill_until_free(disk, free_bytes):
    stat = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(stat.f_bavail * stat.f_frsize - free_bytes))


@pytest.mark.root
def test_a_full_disk_keeps_the_good_step_and_says_how_much_is_missing(small_disk):
    said: list[str] = []
    checkpointer = Checkpointer(small_disk / "run", warn=said.append)
    checkpointer.save(1, STATE, {"n": 1})
    checkpointer.wait()
    fill_until_free(small_disk, 400_000)
    checkpointer.save(2, STATE)
    checkpointer.wait()
    (line,) = said
    # 1.2 MB are needed and 0.4 MB free: 0.8 MB missing (less what the file system rounds up).
    assert "step 2 was not saved" in line
    assert "1.2 MB needed, 0.4 MB free, 0.8 MB missing" in line
    assert os.listdir(small_disk / "run") == ["step_00000001"]
    assert checkpointer.saved_step == 1
    # Space comes back, and so do saves.
    (small_disk / "ballast").unlink()
    checkpointer.save(3, STATE)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 3]
    assert checkpointer.restore(STATE).state["w"].tobytes() == STATE["w"].tobytes()


@pytest.fixture
def broken_disk(monkeypatch):
    """Writes fail with the error last put into the list, when a part is written; empty: they work."""
    errors: list[BaseException] = []
    real = store.write_share

    def write(*args):
        found = real(*args)
        if errors:
            raise errors[-1]
        return found

    monkeypatch.setattr(store, "write_share", write)
    return errors


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (RuntimeError("anything a library may raise"), "RuntimeError: anything"),
    ],
)
def test_a_failed_save_is_a_warning_and_leaves_nothing(tmp_path, broken_disk, error, words):
    said: list[str] = []
    with Checkpointer(tmp_path, warn=said.append) as checkpointer:
        broken_disk.append(error)
        checkpointer.save(1, STATE)
    (line,) = said
    assert words in line
    assert "Training goes on" in line
    assert "HINT" in line
    assert os.listdir(tmp_path) == []


def test_several_failures_in_a_row_are_an_error(tmp_path, broken_disk):
    checkpointer = Checkpointer(tmp_path, warn=lambda line: None)
    checkpointer.save(1, STATE)
    checkpointer.wait()
    broken_disk.append(OSError(errno.ENOSPC, "No space left on device"))
    for step in (2, 3, 4):
        checkpointer.save(step, STATE)
    with pytest.raises(CheckpointError, match=r"3 checkpoints .*\[Errno 28\]"):
        checkpointer.wait()
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_a_good_save_forgives_earlier_failures(tmp_path, broken_disk):
    with Checkpointer(tmp_path, warn=lambda line: None, async_save=False, max_failures=2) as checkpointer:
        for step in range(6):
            if step % 2:
                broken_disk.clear()
            else:
                broken_disk.append(OSError(errno.EIO, "Input/output error"))
            checkpointer.save(step, STATE)
        assert checkpointer.steps() == [1, 3, 5]


def test_the_loop_waits_for_the_copy_and_not_for_the_disk(tmp_path, monkeypatch):
    disk_is_free, real = threading.Event(), store.write_share
    monkeypatch.setattr(store, "write_share", lambda *args: disk_is_free.wait(90) and real(*args))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": jnp.ones(10)})  # returns while the disk is stuck
    assert checkpointer.saved_step is None
    disk_is_free.set()
    checkpointer.wait()
    assert checkpointer.saved_step == 1


def test_old_steps_that_cannot_be_deleted_are_a_warning(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    said: list[str] = []
    with Checkpointer(tmp_path, keep_last=1, async_save=False, warn=said.append) as checkpointer:
        checkpointer.save(1, STATE)
        monkeypatch.setattr(store.folders, "remove", refuse)
        checkpointer.save(2, STATE)
    assert checkpointer.saved_step == 2
    assert "Permission denied" in said[0]


def test_a_place_that_is_no_folder_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"file.*HINT: name a folder"):
            Checkpointer(place)


def test_a_folder_that_may_not_be_written_is_refused_at_the_start(tmp_path, monkeypatch):
    # Root may write anywhere, so the kernel's answer for other users is put in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=f"^{tmp_path} "):
        Checkpointer(tmp_path)


def test_files_of_other_people_are_ignored(tmp_path):
    for name in ("9999999", "step_9999999", "step_00000001x", "step_000000000000001", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000003").write_text("a file, no folder")
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps() == []
    assert checkpointer.restore(STATE) is None
