"""What a save costs beside the disk, in calls of functions: it runs beside the steps, on the same cores."""

import os
from pathlib import Path

import numpy as np

from cyxjax.checkpoint import store
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import MANIFEST, installed_versions
from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.checkpoint.tree import host_copy, refuse_unsavable
from tests.support.calls import calls_of


def calls_of_save(folder, num_leaves):
    store = StepStore(folder, is_writer=True)
    leaves = {f"leaf_{i}": np.full(3, i, np.float32) for i in range(num_leaves)}

    def save(step):
        refuse_unsavable(leaves)
        store.write(Snapshot(step, host_copy(leaves), {}, None))

    save(1)  # what is made once
    calls = calls_of(lambda: save(2))
    assert store.manifest(2).versions["numpy"] == np.__version__
    return calls


def test_a_save_finds_the_installed_packages_once(tmp_path):
    # 830 calls when this was written; 29,000 as long as each save read the packages' descriptions.
    assert calls_of_save(tmp_path / "steps", 1) < 1500
    assert calls_of(installed_versions) <= 1


def test_a_leaf_costs_a_save_few_calls(tmp_path):
    few, many = calls_of_save(tmp_path / "few", 10), calls_of_save(tmp_path / "many", 110)
    # 69 when this was written; 91 while dtypes were named leaf by leaf, 316 as long as a protocol was asked.
    assert (many - few) / 100 < 85


def test_a_save_reads_no_manifest_again_but_one_that_changed(tmp_path, monkeypatch):
    steps, read = StepStore(tmp_path / "steps", is_writer=True), []
    for step in (1, 2, 3):
        steps.write(Snapshot(step, {"a": np.zeros(2, np.float32)}, {}, float(step)))
    look = store.read_manifest
    monkeypatch.setattr(store, "read_manifest", lambda folder: read.append(folder.name) or look(folder))
    assert steps.metrics() == steps.metrics() == {1: 1.0, 2: 2.0, 3: 3.0}
    assert len(read) == 3
    manifest = step_folder(steps.directory, 2) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert steps.metrics() == {1: 1.0, 3: 3.0}


def test_a_save_syncs_each_file_and_folder_once_before_it_is_a_step(tmp_path, monkeypatch):
    # Each waits for the disk, some 5 ms, and the end of a run for all of them; the folder was synced twice.
    steps, done, rename, sync = StepStore(tmp_path, is_writer=True), [], Path.rename, os.fsync

    def synced(fd):
        done.append(os.fstat(fd).st_ino)
        sync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda *paths: done.append("renamed") or rename(*paths))
    steps.write(Snapshot(1, {"a": np.zeros(2, np.float32)}, {}, None))
    parts = [step_folder(tmp_path, 1), *step_folder(tmp_path, 1).rglob("*")]
    assert len(parts) == 4  # itself, the manifest, the folder of arrays and their file
    assert sorted(done[:-2]) == sorted(path.stat().st_ino for path in parts)
    assert done[-2:] == ["renamed", tmp_path.stat().st_ino]
