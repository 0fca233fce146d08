"""One job per run folder: the error names the owner, and the lock is free once its process has ended."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from unittest.mock import Mock

import pytest

from cyxjax.checkpoint import run_lock
from cyxjax.checkpoint.run_lock import LOCK, locked
from cyxjax.errors import CheckpointError

HOLD = """
import sys
from cyxjax.checkpoint.run_lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def owner_of(folder):
    """The owner of the lock, after taking it."""
    with locked(folder):
        return (folder / LOCK).read_text()


def test_a_second_job_is_refused_with_the_name_of_the_first_until_that_is_killed(tmp_path):
    (tmp_path / LOCK).write_bytes(b'{"host": "a", "pid": 7, "since": "of 0.2.0"}' + os.urandom(400))
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"{tmp_path.name} .*process {job.pid} .*{LOCK}"):
            owner_of(tmp_path)
        os.kill(job.pid, 9)
        os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its pid still exists
        assert f"process {os.getpid()} " in owner_of(tmp_path)


def test_released_on_errors_and_free_again(tmp_path):
    run = tmp_path / "run"
    with suppress(ZeroDivisionError), locked(run):
        assert (run.stat().st_mode & 0o777, (run / LOCK).stat().st_mode & 0o777) == (0o700, 0o600)
        with pytest.raises(CheckpointError):
            owner_of(run)  # also within this process
        raise ZeroDivisionError
    assert owner_of(run)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=LOCK):
        owner_of(tmp_path)
    assert (tmp_path / "target").read_text() == "mine"


FORK = """
import os, sys
from contextlib import ExitStack
from cyxjax.checkpoint.run_lock import locked
from cyxjax.errors import CheckpointError
held = ExitStack()
held.enter_context(locked(sys.argv[1]))
if os.fork() == 0:
    held.close()  # its parent's stays
    os._exit(0)
os.wait()
try:
    ExitStack().enter_context(locked(sys.argv[1]))
except CheckpointError:
    print("held")
ready, go_on = os.pipe()
child = os.fork()
if child == 0:  # has the file open
    os.close(go_on)
    os.read(ready, 1)  # until the parent closes its end
    os._exit(0)
held.close()
with locked(sys.argv[1]):
    print("free", flush=True)
os.close(go_on)
os.waitpid(child, 0)
"""


def test_a_released_folder_is_free_although_a_forked_child_lives(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("held\nfree\n", "")


def test_where_there_are_no_locks_nothing_is_locked(tmp_path, monkeypatch):
    no_locks = Mock(side_effect=OSError(errno.EOPNOTSUPP, "Operation not supported"))
    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    with locked(tmp_path):
        assert owner_of(tmp_path)
