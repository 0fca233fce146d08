"""With a full disk, a slow disk or a read-only folder, training continues with a warning."""

import errno
import os
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from cyxjax.checkpoint import store, writers
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.errors import CheckpointError

STATE = {"w": np.random.default_rng(0).random(300_000, np.float32)}  # 1.2 MB


@pytest.fixture
def broken_disk(monkeypatch):
    """A list: writing a part fails with its last error; writes succeed while it is empty."""
    errors: list[BaseException] = []
    real = writers.write_share

    def write(*args):
        found = real(*args)
        if errors:
            raise errors[-1]
        return found

    monkeypatch.setattr(writers, "write_share", write)
    return errors


@pytest.mark.parametrize(
    ("error", "words"),
    [
        # 0.4 MB free
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "full: 1.2 MB needed for its arrays, 400.0 kB free",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (RuntimeError("anything a library may raise"), "RuntimeError: anything"),
    ],
)
def test_a_failed_save_is_a_warning_and_leaves_nothing(tmp_path, monkeypatch, broken_disk, error, words):
    warnings: list[str] = []
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=400_000))
    with Checkpointer(tmp_path, warn=warnings.append) as checkpointer:
        broken_disk.append(error)
        checkpointer.save(1, STATE)
    (line,) = warnings
    assert words in line
    assert "Training goes on" in line
    assert "HINT" in line
    assert os.listdir(tmp_path) == []


def test_several_failures_in_a_row_are_an_error_and_a_good_save_forgives_those_before(tmp_path, broken_disk):
    full = OSError(errno.ENOSPC, "No space left on device")
    checkpointer = Checkpointer(tmp_path, warn=lambda line: None)
    for step, errors in enumerate([[], [full], [full], [], [full], [full]]):
        broken_disk[:] = errors
        checkpointer.save(step, STATE)
        checkpointer.wait()
    checkpointer.save(6, STATE)
    with pytest.raises(CheckpointError, match=r"3 checkpoints .*\[Errno 28\]"):
        checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["step_00000000", "step_00000003"]


def test_old_steps_that_cannot_be_deleted_are_a_warning(tmp_path, monkeypatch):
    warnings: list[str] = []
    with Checkpointer(tmp_path, keep_last=1, async_save=False, warn=warnings.append) as checkpointer:
        checkpointer.save(1, STATE)
        refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
        monkeypatch.setattr(store.folders, "remove", refuse)
        checkpointer.save(2, STATE)
    assert checkpointer.steps() == [1, 2]
    assert "Permission denied" in warnings[0]


def test_a_place_that_is_no_folder_or_may_not_be_written_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"^{place} .*HINT"):
            Checkpointer(place)
    # Root can write anywhere, so simulate the kernel's answer for other users.
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
