"""A copy of a run folder in an object store: uploads are complete, and downloads are verified."""

import json
import shutil
import uuid
from contextlib import contextmanager
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest

from cyxjax.checkpoint import store
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_aside, list_steps
from cyxjax.checkpoint.mirror import Mirror
from cyxjax.errors import CheckpointError
from cyxjax.run_folder import RunFolder
from tests.support.refusals import refused
from tests.support.waiting import until

STORE = fsspec.filesystem("memory")


class Place:
    """A run folder and its copy in memory."""

    def __init__(self, root, url):
        self.folder, self.url, self.warnings = RunFolder(root), url, []

    def save(self, *steps, value=None, keep=3):
        self.folder.root.mkdir(exist_ok=True)
        with Checkpointer(self.folder.checkpoints, keep_last=keep, keep_best=0) as kept:
            for step in steps:
                kept.save(step, {"w": np.full(8, step if value is None else value, np.float32)})
        self.folder.metrics.write_text(json.dumps({"step": steps[-1], "value": value}) + "\n")

    def mirror(self):
        return Mirror(self.url, self.folder, self.warnings.append)

    @contextmanager
    def copied(self):
        """Mirrors during a run; at its end everything is uploaded."""
        mirror = self.mirror()
        mirror.start()
        try:
            yield
        finally:
            mirror.end(hurried=False)

    def copy(self):
        with self.copied():
            pass

    def stored(self):
        found = STORE.glob(f"{self.url}/checkpoints/step_*/MANIFEST.json")
        return sorted(int(name.split("/")[-2][-8:]) for name in found)

    def value(self):
        kept = Checkpointer(self.folder.checkpoints).restore({"w": np.zeros(8, np.float32)})
        return float(kept.state["w"][0])


@pytest.fixture
def here(tmp_path):
    """A run folder and its empty copy."""
    url = f"memory://{uuid.uuid4().hex}/run"
    yield Place(tmp_path / "a", url)
    STORE.rm(url.partition("//")[2].partition("/")[0], recursive=True) if STORE.exists(url) else None


@pytest.fixture
def other(here, tmp_path):
    """An empty folder on another machine, with the same copy."""
    return Place(tmp_path / "b", here.url)


def test_a_start_on_an_empty_machine_takes_the_newest_step_with_its_logs(here, other, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "time", Mock(time=Mock(side_effect=[4e9, 4e9, 1.0])))  # its clock is behind
    here.save(4, 8)
    here.copy()
    assert here.stored() == [4, 8]
    alive = Mock()
    assert other.mirror().fetch(alive) == 8
    assert alive.called  # so that a download of an hour is not taken for a hang
    assert list_steps(other.folder.checkpoints) == [8]
    assert other.value() == 8
    assert other.folder.metrics.read_bytes() == here.folder.metrics.read_bytes()
    assert not (other.folder.checkpoints / ".mirror").exists()
    assert other.mirror().fetch() is None  # nothing newer
    other.save(12)
    other.copy()
    assert Place(tmp_path / "c", here.url).mirror().fetch() == 12


def test_a_step_without_its_manifest_is_none_and_one_that_was_altered_is_passed_over(here, other, tmp_path):
    here.save(4, 8, 12)
    here.copy()
    STORE.rm_file(f"{here.url}/checkpoints/step_00000012/MANIFEST.json")
    altered = STORE.find(f"{here.url}/checkpoints/step_00000008/arrays")[0]
    STORE.pipe_file(altered, STORE.cat_file(altered)[:-1] + b"\x7f")
    assert other.mirror().fetch() == 4
    assert other.value() == 4
    STORE.rm(f"{here.url}/checkpoints/step_00000004", recursive=True)
    with pytest.raises(CheckpointError, match=here.url):
        Place(tmp_path / "c", here.url).mirror().fetch()


def test_steps_that_are_pruned_here_go_there_too_once_newer_ones_are_up(here, other):
    here.save(4)
    with here.copied():
        here.save(8, 12, 16, keep=2)
        assert until(lambda: 16 in here.stored(), 30)
        here.save(16, value=2.0, keep=2)  # saved again, as after a rollback
        here.mirror()._send(4)  # pruned since it was found
    assert here.stored() == [12, 16]
    assert other.mirror().fetch() == 16
    assert other.value() == 2.0
    assert here.warnings == []


def test_a_folder_that_is_lost_here_stays_there(here):
    here.save(4)
    with here.copied():
        here.save(8)
        assert until(lambda: here.stored() == [4, 8], 30)
        shutil.rmtree(here.folder.checkpoints)
    assert here.stored() == [4, 8]


def test_a_good_copy_is_taken_where_the_step_here_is_damaged(here):
    here.save(4, 8)
    here.copy()
    array = next((here.folder.checkpoints / "step_00000008" / "arrays").iterdir())
    array.write_bytes(array.read_bytes()[:-1] + b"\x7f")
    assert here.mirror().fetch() == 8
    assert here.value() == 8


def test_a_start_that_is_cut_off_in_the_logs_takes_the_step_and_the_logs_again(here, other, monkeypatch):
    real = STORE.cat_file
    here.save(4)
    here.copy()

    def cut_off(path, *args, **options):
        if path.endswith(here.folder.metrics.name):
            raise ConnectionError
        return real(path, *args, **options)

    monkeypatch.setattr(STORE, "cat_file", cut_off)
    with pytest.raises(CheckpointError, match="ConnectionError"):
        other.mirror().fetch()
    monkeypatch.setattr(STORE, "cat_file", real)
    assert other.mirror().fetch() == 4
    assert other.folder.metrics.read_bytes() == here.folder.metrics.read_bytes()


def test_a_log_in_a_folder_is_whole_also_where_its_copy_was_cut_off(tmp_path, monkeypatch):
    here = Place(tmp_path / "a", f"file://{tmp_path}/store/run")
    here.save(1)
    here.copy()
    log = tmp_path / "store" / "run" / here.folder.metrics.name
    before = log.read_text()

    def cut_off(source, target):
        open(target, "w").close()
        raise OSError("killed")

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "copyfile", cut_off)
        here.save(2)
        with pytest.raises(OSError, match="killed"):
            here.mirror()._send_logs()
    assert log.read_text() == before
    here.copy()
    assert log.read_text() == here.folder.metrics.read_text() != before
    assert not list((tmp_path / "store").rglob("*.part"))


def test_the_course_that_was_saved_last_counts_whatever_its_steps_are_called(here, other):
    here.save(4, 8)
    here.copy()
    other.save(4, value=2.0)
    other.copy()
    assert here.mirror().fetch() == 4
    assert here.value() == 2.0
    assert len(list_aside(here.folder.checkpoints, "earlier")) == 1  # its step 8


def test_a_store_that_cannot_be_read_stops_only_a_start_that_has_nothing_here(here, monkeypatch):
    monkeypatch.setattr(STORE, "ls", Mock(side_effect=PermissionError("secret_key=hunter2 may not do that")))
    with pytest.raises(CheckpointError, match=f"{here.url}.*PermissionError"):
        here.mirror().fetch()
    here.save(4)
    assert here.mirror().fetch() is None
    assert len(here.warnings) == 1
    assert "hunter2" not in here.warnings[0]


def test_a_place_without_its_library_names_the_key(here):
    here.url = "nosuch://bucket/run"
    with refused("mirror"):
        here.mirror()
