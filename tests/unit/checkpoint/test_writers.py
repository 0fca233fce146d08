"""Several processes (here threads) write one step: all of it or nothing, whichever process fails."""

import errno
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cyxjax.checkpoint import checkpointer as checkpointer_module
from cyxjax.checkpoint import manifest as manifests
from cyxjax.checkpoint import restoring, tree, writers
from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import find_problems, read_manifest
from cyxjax.checkpoint.tree import HostShare
from cyxjax.checkpoint.writers import Writers
from cyxjax.errors import CheckpointError, GroupError

KERNEL, BIAS = np.arange(21, dtype=np.float32).reshape(7, 3), np.arange(2, dtype=np.int8)


class Part(HostShare):
    """A share whose memory the next step reuses, as on a device: `values` is a copy of it."""

    def values(self):
        return self.elements.copy()


def state_of(rank, world, add=0):
    """Sharded as in fsdp: rows of ceil(size / world); the last processes may have nothing of a small leaf."""

    def part(array):
        flat, each = (array + array.dtype.type(add)).reshape(-1), -(-array.size // world)
        start, stop = (min(r * each, array.size) for r in (rank, rank + 1))
        return Part(array.shape, array.dtype, start, stop, flat[start:stop])

    empty = Part((0, 4), np.dtype(np.float32), 0, 0, np.zeros(0, np.float32))
    return {"kernel": part(KERNEL), "bias": part(BIAS), "empty": empty, "step": np.int32(7 + add)}


def at_once(world, do):
    """The result or error of `do(rank, writers)` in each of `world` threads, which act like processes."""
    notes, barrier = [None] * world, threading.Barrier(world, timeout=20)

    def run(rank):
        def exchange(what, note):
            notes[rank] = (what, note)
            barrier.wait()
            found = list(notes)
            barrier.wait()
            assert len({what for what, _ in found}) == 1
            return [note for _, note in found]

        try:
            return do(rank, Writers(rank, exchange))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


def restore(folders, step=None):
    """(result or error of each process, its warnings), each with its own folder; the first one writes."""
    warnings = [[] for _ in folders]

    def run(rank, writers):
        mine = Checkpointer(folders[rank], is_writer=not rank, writers=writers, warn=warnings[rank].append)
        return mine.restore(state_of(rank, len(folders)), step)

    return at_once(len(folders), run), warnings


def save(folder, world, step=3, add=0, **options):
    """The error or the warnings of each of `world` processes during a save."""

    def run(rank, writers):
        warnings = []
        options_of = {"is_writer": rank == 0, "writers": writers, "warn": warnings.append} | options
        with Checkpointer(folder, **options_of) as checkpointer:
            checkpointer.save(step, state_of(rank, world, add), {"add": add})
            checkpointer.finish(0.0)
        return checkpointer.unsaved or warnings

    return at_once(world, run)


@pytest.mark.parametrize(("saved", "restored"), [(4, 2), (4, 3), (2, 4), (3, 1), (1, 2)])
def test_any_number_of_processes_goes_on_from_any_other(tmp_path, saved, restored):
    assert save(tmp_path, saved, async_save=saved > 2) == [[]] * saved
    whole = {"kernel": KERNEL, "bias": BIAS, "empty": np.zeros((0, 4), np.float32), "step": np.int32(7)}
    for want in (whole, *(state_of(rank, restored) for rank in range(restored))):
        found = Checkpointer(tmp_path, is_writer=False).restore(want)
        assert found.meta == {"add": 0}
        for name, leaf in want.items():
            assert found.state[name].tobytes() == tree.host_value(leaf).tobytes(), name


def test_each_process_writes_its_own_elements_and_no_more(tmp_path):
    save(tmp_path, 4)
    folder = step_folder(tmp_path, 3)
    manifest = read_manifest(folder)
    assert sorted(os.listdir(folder)) == ["MANIFEST.json", "arrays"]
    assert (manifest.format_version, len(manifest.files)) == ((3, 0), 4)
    pieces = {leaf.name: [piece[:3] for piece in leaf.pieces] for leaf in manifest.leaves}
    assert pieces["kernel"] == [(0, 0, 6), (1, 6, 12), (2, 12, 18), (3, 18, 21)]
    assert pieces["bias"] == [(0, 0, 1), (1, 1, 2)]  # two numbers, four processes
    assert find_problems(folder, 3) == []


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", ["write_file", "describe_file", "write_whole"])
def test_where_one_process_cannot_write_all_give_up_and_the_last_step_stays(
    tmp_path, monkeypatch, point, rank
):
    save(tmp_path, 3)
    real = getattr(writers, point)

    def failing(*args, **options):
        path = f"{args[0]}{args[1] if point == 'describe_file' else ''}"
        if f"{rank:05d}" in path.replace("step_00000009", ""):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(writers, point, failing)
    ended = save(tmp_path, 3, step=9, max_failures=5)
    assert "OSError: [Errno 28]" in str(ended[rank])
    assert f"process {rank}: OSError" in str(ended[1])
    assert os.listdir(tmp_path) == ["step_00000003"]
    monkeypatch.undo()
    assert save(tmp_path, 3, step=9, add=1) == [[]] * 3
    assert Checkpointer(tmp_path, is_writer=False).restore(state_of(0, 1)).step == 9


def test_the_loop_goes_on_while_the_shares_are_written_and_may_change_them(tmp_path, monkeypatch):
    real, may_write = writers.write_file, threading.Event()

    def late(*args, **options):
        assert may_write.wait(20)
        return real(*args, **options)

    monkeypatch.setattr(writers, "write_file", late)
    all_returned = threading.Barrier(3, timeout=20)

    def run(rank, writers):
        state = state_of(rank, 3)
        with Checkpointer(tmp_path, is_writer=rank == 0, writers=writers) as checkpointer:
            checkpointer.save(3, state)
            state["kernel"].elements[:] = 99  # as the next step, which reuses the memory
            all_returned.wait()
            may_write.set()
        return checkpointer.steps()

    assert at_once(3, run) == [[3]] * 3
    found = Checkpointer(tmp_path, is_writer=False).restore(state_of(0, 1)).state
    np.testing.assert_array_equal(found["kernel"], KERNEL.reshape(-1))


def test_a_program_that_ends_in_an_error_waits_for_no_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer_module, "_AFTER_ERROR_S", 0.01)
    peers_come = threading.Event()

    def waits(what, note):
        peers_come.wait(60)
        raise GroupError("nobody came")

    checkpointer = Checkpointer(tmp_path, writers=Writers(0, waits))

    def train():
        with checkpointer:
            checkpointer.save(3, state_of(0, 2))
            raise RuntimeError("connection reset by peer")

    with pytest.raises(RuntimeError, match="connection"):
        train()
    peers_come.set()
    with pytest.raises(GroupError):  # raised when the program waits for the save
        checkpointer.wait()
    assert os.listdir(tmp_path) == []


def test_a_process_that_does_not_see_the_folder_says_so(tmp_path):
    """Hosts whose checkpoint_dir is on a local disk."""

    def run(rank, writers):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        with Checkpointer(folder, is_writer=not rank, writers=writers, max_failures=1) as mine:
            mine.save(1, state_of(rank, 2))

    assert all("all hosts share" in str(error) for error in at_once(2, run))
    assert os.listdir(tmp_path / "host0") == []


def damage(folder, step, process):
    path = step_folder(folder, step) / "arrays" / f"process_{process:05d}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_each_file_is_compared_with_its_digest_by_one_process_for_all(tmp_path, monkeypatch, world):
    save(tmp_path, 4)
    read, real = [], manifests._sha256
    monkeypatch.setattr(manifests, "_sha256", lambda path, **options: read.append(path.name) or real(path))
    found, warnings = restore([tmp_path] * world)
    assert sorted(read) == [f"process_{i:05d}.safetensors" for i in range(4)]
    assert [one.step for one in found] == [3] * world
    assert warnings == [[]] * world


@pytest.mark.parametrize("process", [0, 1, 2])
def test_what_one_process_finds_damaged_no_process_goes_on_from(tmp_path, process):
    save(tmp_path, 3, step=1)
    save(tmp_path, 3, step=2, add=1)
    damage(tmp_path, 2, process)
    found, warnings = restore([tmp_path] * 2)  # only the second compares the file of process 1
    assert [one.step for one in found] == [1, 1]
    finder = process % 2
    assert all(f"damaged: process {finder}: arrays/process_{process:05d}" in lines[0] for lines in warnings)
    assert sorted(name[:18] for name in os.listdir(tmp_path)) == ["step_00000001", "step_00000002.corr"]


def test_a_step_that_is_pruned_while_it_is_verified_fails_on_all(tmp_path, monkeypatch):
    real = restoring.find_problems
    save(tmp_path / "a", 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def pruned(folder, *args):
        found = real(folder, *args)
        shutil.rmtree(folder) if folder.parent.name == "b" else None
        return found

    monkeypatch.setattr(restoring, "find_problems", pruned)
    found, _ = restore([tmp_path / "a", tmp_path / "b"], 3)
    assert "process 1: " in str(found[0])
    assert isinstance(found[1], OSError | CheckpointError)


def test_damage_on_the_disk_of_one_host_is_found_though_another_compared_the_digests(tmp_path):
    """The first process compares that file on its own disk, where it is intact."""
    save(tmp_path / "a", 3, step=1)
    save(tmp_path / "a", 3, step=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    damage(tmp_path / "b", 2, 2)
    found, warnings = restore([tmp_path / "a", tmp_path / "b"])
    assert [one.step for one in found] == [1, 1]
    assert re.search("process 1: .*crc32", warnings[0][0])
    assert found[1].state["kernel"].tobytes() == state_of(1, 2)["kernel"].values().tobytes()


def test_processes_that_do_not_see_one_step_go_on_from_none(tmp_path):
    save(tmp_path / "a", 2, step=1)
    (tmp_path / "none").mkdir()
    save(tmp_path / "other", 2, step=1, add=1)
    for disks, step, words in [
        (["a", "none"], None, "for process 1 step 1 is not there.*HINT: name a folder that all hosts see"),
        (["none", "a"], None, r"for process 0 no step is there \(process 1 sees some\)"),
        (["a", "other"], None, "for process 1 step 1 is another one"),
        (["a", "none"], 1, "step 1 is not there"),
        (["a", "a"], 7, "MANIFEST.json: No such file"),
    ]:
        found, _ = restore([tmp_path / name for name in disks], step)
        for error in found:
            assert isinstance(error, CheckpointError)
            assert re.search(words, str(error))
    assert os.listdir(tmp_path / "a") == ["step_00000001"]  # no process sets it aside


def test_where_one_process_cannot_read_the_others_hear_of_it(tmp_path):
    save(tmp_path, 2)

    def run(rank, writers):
        def put(want, read):
            if rank:
                raise MemoryError("no room")
            return read()

        return Checkpointer(tmp_path, is_writer=not rank, writers=writers).restore(state_of(rank, 2), put=put)

    mine, its = at_once(2, run)
    assert "reading checkpoint step 3 failed, process 1: MemoryError: no room" in str(mine)
    assert isinstance(its, MemoryError)
