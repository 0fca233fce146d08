"""One run folder, one job: refused by name, taken over after proof of death, never stolen, never left."""

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.checkpoint import run_lock
from cyxjax.checkpoint.run_lock import LOCK, Holder, RunLock, read_holder
from cyxjax.errors import CheckpointError

HOLD = """
import sys
from cyxjax.checkpoint.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def leave(run_dir, **changes):
    """Put a lock of this process, with `changes`, into `run_dir`."""
    holder = replace(Holder.this_process(), **changes)
    run_dir.mkdir(exist_ok=True)
    (run_dir / LOCK).write_text(json.dumps(asdict(holder)))
    return holder


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
    with pytest.raises(CheckpointError, match=rf"in use by process {other_job.pid} on .* since .* UTC.*HINT"):
        RunLock(tmp_path).acquire()
    assert read_holder(tmp_path / LOCK).pid == other_job.pid


def test_a_killed_job_is_taken_over_at_once(tmp_path, other_job):
    other_job.kill()
    other_job.wait()
    with RunLock(tmp_path) as lock:
        assert read_holder(lock.path).pid == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_zombie_is_dead(tmp_path, other_job):
    os.kill(other_job.pid, 9)
    os.waitid(os.P_PID, other_job.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped: its pid still exists
    assert "that process is gone" in RunLock(tmp_path).acquire()


def test_released_on_errors_and_free_again(tmp_path):
    def fail():
        with RunLock(tmp_path / "run") as lock:
            assert lock.path.stat().st_mode & 0o777 == 0o600
            assert lock.acquire() == ""
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.listdir(tmp_path / "run") == []
    assert RunLock(tmp_path / "run").acquire() == ""


def test_two_locks_in_one_process_exclude_each_other(tmp_path):
    with RunLock(tmp_path), pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path).acquire()


def test_a_reused_pid_is_not_the_holder(tmp_path):
    leave(tmp_path, process_start="1")
    assert "its number belongs to another" in RunLock(tmp_path).acquire()


def test_a_reboot_is_proof_of_death(tmp_path):
    leave(tmp_path, boot="another boot")
    assert "restarted" in RunLock(tmp_path).acquire()


@pytest.mark.parametrize("elsewhere", [{"host": "node-7"}, {"machine": "0" * 16}])
def test_another_machine_is_never_judged(tmp_path, elsewhere):
    # Its pid does not exist here and its boot differs: neither proves anything about another machine.
    holder = leave(tmp_path, **elsewhere, pid=2**22 - 1, boot="x")
    with pytest.raises(
        CheckpointError, match=f"{holder.host}.*cannot be seen from here. HINT: .*delete run.lock"
    ):
        RunLock(tmp_path).acquire()
    assert read_holder(tmp_path / LOCK) == holder


def test_another_container_is_judged_by_its_kernel_lock(tmp_path, other_job):
    # The same pid means nothing in another pid namespace; the flock, which the kernel drops at death, does.
    path = tmp_path / LOCK
    holder = replace(read_holder(path), pid_namespace="pid:[1]")
    with path.open("r+") as file:  # same file, so other_job's flock stays
        json.dump(asdict(holder), file)
        file.truncate()
    with pytest.raises(CheckpointError, match="cannot be seen from here"):
        RunLock(tmp_path).acquire()
    other_job.kill()
    other_job.wait()
    assert "container it ran in has ended" in RunLock(tmp_path).acquire()


def test_a_lock_that_became_anothers_is_not_deleted(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.path.unlink()
    other = leave(tmp_path, host="node-7")
    lock.release()
    assert read_holder(tmp_path / LOCK) == other


def test_of_many_that_see_one_dead_holder_exactly_one_wins(tmp_path):
    for _ in range(20):
        leave(tmp_path, process_start="1")
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


def test_a_link_is_refused_and_not_followed(tmp_path):
    (tmp_path / "target").write_text("{}")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(CheckpointError, match="plain file"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "target").read_text() == "{}"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file.*HINT"):
        RunLock(tmp_path / "file" / "run").acquire()


@given(st.one_of(st.binary(max_size=200), st.just(b"[" * 4000), st.just(b'{"pid": 1}'), st.just(b"")))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_other_content_is_a_clear_error(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(CheckpointError, match="not a lock that cyxjax wrote"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / LOCK).read_bytes() == content


def test_deleting_the_lock_file_of_a_running_job_lets_nobody_in(tmp_path, other_job):
    (tmp_path / LOCK).unlink()
    with pytest.raises(CheckpointError, match="whose lock file was deleted: the kernel holds"):
        RunLock(tmp_path).acquire()
    other_job.kill()
    other_job.wait()
    assert RunLock(tmp_path).acquire() == ""


def test_a_lock_file_that_names_the_dead_does_not_open_a_folder_the_kernel_holds(tmp_path, other_job):
    leave(tmp_path, process_start="1")
    with pytest.raises(CheckpointError, match="its number belongs to another.*fuser"):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("make", ["gone", "garbage", "link"])
def test_the_job_notices_that_its_lock_file_went_and_writes_it_again(tmp_path, make):
    with RunLock(tmp_path) as lock:
        assert lock.check() == ""
        lock.path.unlink()
        if make == "garbage":
            lock.path.write_text("{}")
        elif make == "link":
            (tmp_path / "target").write_text("mine")
            lock.path.symlink_to(tmp_path / "target")
        assert "was deleted or overwritten under this job. It was written again" in lock.check()
        assert lock.check() == ""
        assert read_holder(lock.path).pid == os.getpid()
        assert make != "link" or (tmp_path / "target").read_text() == "mine"
    assert not lock.path.exists()


def test_the_job_notices_that_its_folder_is_gone_or_another(tmp_path):
    run = tmp_path / "run"
    lock = RunLock(run)
    lock.acquire()
    run.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="was deleted under this job.*HINT"):
        lock.check()
    with RunLock(run), pytest.raises(CheckpointError, match="was replaced by another folder or link"):
        lock.check()
    run.rmdir()
    run.symlink_to(tmp_path / "moved")  # the very same folder by another name is no harm
    assert lock.check() == ""
    lock.release()


FORK = """
import os, sys
from cyxjax.checkpoint.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
ready, go_on = os.pipe()
child = os.fork()
if child == 0:
    os.close(go_on)
    os.read(ready, 1)  # until the parent closes its end
    os._exit(0)
lock.release()
with RunLock(sys.argv[1]):
    print("free")
os.close(go_on)
os.waitpid(child, 0)
"""


def test_a_released_folder_is_free_although_a_forked_child_lives(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("free\n", "")


def test_where_there_are_no_locks_a_job_that_lives_is_still_refused(tmp_path, monkeypatch):
    def no_locks(fd):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("cyxjax.checkpoint.run_lock.flock_now", no_locks)
    with RunLock(tmp_path), pytest.raises(CheckpointError, match="in use by process"):
        RunLock(tmp_path).acquire()
    leave(tmp_path, process_start="1")
    with pytest.raises(CheckpointError, match="no locks on this file system"):
        RunLock(tmp_path).acquire()


def test_a_full_disk_is_one_line_and_leaves_no_lock(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_lock.os, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device\. HINT: free space there"):
        RunLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == []
