"""One run folder, one job: refused by name, free as soon as the job's process is gone, never left behind."""

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.checkpoint import run_lock
from cyxjax.checkpoint.run_lock import LOCK, LockOwner, RunLock, read_owner
from cyxjax.errors import CheckpointError

HOLD = """
import sys
from cyxjax.checkpoint.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
BY_0_2_0 = {"host": "a", "machine": "0", "boot": "b", "pid": 7, "since": "then", "token": "t"}


@pytest.fixture
def other_job(tmp_path):
    """A living process that holds the lock of tmp_path."""
    job = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "held\n"
    yield job
    job.kill()
    job.communicate()


def test_the_second_job_is_refused_with_the_name_of_the_first(tmp_path, other_job):
    with pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path).acquire()
    owner = read_owner(tmp_path / LOCK)
    assert owner.pid == other_job.pid
    assert str(owner) in str(refused.value)


def test_the_folder_of_a_killed_job_is_free_at_once(tmp_path, other_job):
    os.kill(other_job.pid, 9)
    os.waitid(os.P_PID, other_job.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its pid still exists
    with RunLock(tmp_path) as lock:
        assert read_owner(lock.path).pid == os.getpid()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("owner", [vars(LockOwner("elsewhere", 7, "then")), BY_0_2_0], ids=["other", "0.2.0"])
def test_a_file_that_no_process_locks_is_free_whatever_it_says(tmp_path, owner):
    (tmp_path / LOCK).write_text(json.dumps(owner))
    assert read_owner(tmp_path / LOCK).pid == 7
    with RunLock(tmp_path) as lock:
        assert read_owner(lock.path).pid == os.getpid()


def test_released_on_errors_and_free_again(tmp_path):
    def fail():
        with RunLock(tmp_path / "run") as lock:
            assert lock.path.stat().st_mode & 0o777 == 0o600
            lock.acquire()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.listdir(tmp_path / "run") == []
    with RunLock(tmp_path / "run"):
        pass


def test_two_locks_in_one_process_exclude_each_other(tmp_path):
    with RunLock(tmp_path), pytest.raises(CheckpointError):
        RunLock(tmp_path).acquire()


def test_a_file_that_became_anothers_is_not_deleted(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.path.unlink()
    lock.path.write_text("another's")
    lock.release()
    assert (tmp_path / LOCK).read_text() == "another's"


def test_of_many_jobs_exactly_one_wins(tmp_path):
    for _ in range(20):
        (tmp_path / LOCK).write_text(json.dumps(BY_0_2_0))
        locks, won, start = [RunLock(tmp_path) for _ in range(4)], [], threading.Barrier(4)

        def run(lock, won=won, start=start):
            start.wait()
            with suppress(CheckpointError):
                lock.acquire()
                won.append(lock)

        threads = [threading.Thread(target=run, args=(lock,)) for lock in locks]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(won) == 1
        won[0].release()
        assert os.listdir(tmp_path) == []


def test_a_file_removed_between_opening_and_locking_is_made_again(tmp_path, monkeypatch):
    real, calls = run_lock.flock_now, []

    def removed_first(fd):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(fd)
        return real(fd)

    monkeypatch.setattr(run_lock, "flock_now", removed_first)
    with RunLock(tmp_path) as lock:
        assert len(calls) == 2
        assert read_owner(lock.path).pid == os.getpid()


def test_a_link_and_a_fifo_are_refused_and_not_followed(tmp_path):
    (tmp_path / "target").write_text("{}")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path).acquire()
    assert LOCK in str(refused.value)
    assert (tmp_path / "target").read_text() == "{}"
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(CheckpointError):
        RunLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path / "file" / "run").acquire()
    assert str(tmp_path / "file" / "run") in str(refused.value)


@given(st.one_of(st.binary(max_size=200), st.just(b"[" * 4000), st.just(b'{"pid": 1}'), st.just(b"")))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_other_content_names_nobody(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    assert read_owner(tmp_path / LOCK) is None
    with RunLock(tmp_path):
        assert read_owner(tmp_path / LOCK).pid == os.getpid()


FORK = """
import os, sys
from cyxjax.checkpoint.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
ready, go_on = os.pipe()
child = os.fork()
if child == 0:
    os.close(go_on)
    lock.release()  # its parent's stays
    os.read(ready, 1)  # until the parent closes its end
    os._exit(0)
assert lock.path.exists()
lock.release()
with RunLock(sys.argv[1]):
    print("free")
os.close(go_on)
os.waitpid(child, 0)
"""


def test_a_released_folder_is_free_although_a_forked_child_lives(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("free\n", "")


def test_where_there_are_no_locks_a_file_that_names_a_process_counts(tmp_path, monkeypatch):
    def no_locks(fd):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(run_lock, "flock_now", no_locks)
    with RunLock(tmp_path), pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path).acquire()
    assert str(tmp_path / LOCK) in str(refused.value)
    with RunLock(tmp_path):
        pass


def test_a_full_disk_is_one_line_and_leaves_no_lock(tmp_path, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_lock.os, "pwrite", full)
    with pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path).acquire()
    assert "No space left on device" in str(refused.value)
    assert os.listdir(tmp_path) == []
