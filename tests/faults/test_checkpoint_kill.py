"""SIGKILL at random and at chosen moments of a save: what was reported saved is there, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cyxjax.checkpoint.checkpointer import Checkpointer
from tests.faults import checkpoint_writer
from tests.faults.checkpoint_writer import NUM_FLOATS, state_of

TARGET = {"w": np.zeros(NUM_FLOATS, np.float32), "step": np.zeros((), np.int32)}
STORE, WRITERS = "cyxjax.checkpoint.store", "cyxjax.checkpoint.writers"
FOLDERS = "cyxjax.checkpoint.folders"

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def writers():
    """A process that forks a saving job for each line written to its stdin."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", checkpoint_writer.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    yield process
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


def start(writers, *words):
    """The pid of a new job, from its first line."""
    writers.stdin.write((" ".join(map(str, words)) + "\n").encode())
    writers.stdin.flush()
    return int(writers.stdout.readline().split()[1])


def wait_until_gone(pid):
    deadline = time.monotonic() + 90
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_while_saving(writers, folder, num_lines, delay_s):
    """The last step the job reported, or None if it was killed before its first was on disk."""
    pid = start(writers, folder)
    # A line each time a save begins, so a slow machine kills as many saves half way as a fast one.
    lines = [writers.stdout.readline() for _ in range(num_lines)]
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    os.set_blocking(writers.stdout.fileno(), False)
    lines += (writers.stdout.read() or b"").splitlines()
    os.set_blocking(writers.stdout.fileno(), True)
    step = lines[-1].split()[1]
    return None if step == b"None" else int(step)


def leftovers(folder):
    return [name for name in os.listdir(folder) if ".tmp-" in name or ".old-" in name]


def test_thirty_kills_lose_nothing_that_was_reported(writers, tmp_path):
    rng = random.Random(3)
    half_written, last = 0, -1
    for _ in range(30):
        reported = kill_while_saving(writers, tmp_path, rng.choice([1, 1, 1, 2, 3]), rng.uniform(0, 0.1))
        half_written += bool(leftovers(tmp_path))
        said: list[str] = []
        restored = Checkpointer(tmp_path, warn=said.append).restore(TARGET)
        assert leftovers(tmp_path) == []  # removed as the next start of the job would
        assert restored is not None or (last == -1 and reported is None)
        if restored is not None:
            assert restored.step >= max(last, -1 if reported is None else reported)
            assert restored.meta == {"step": restored.step}
            assert restored.state["w"].tobytes() == state_of(restored.step)["w"].tobytes()
            last = restored.step
        assert said == []
    assert half_written >= 5  # else the kills missed the saves, and this has shown nothing
    assert last >= 5


@pytest.mark.parametrize(
    ("point", "survives"),
    [
        (f"{STORE}:write_share:before", "old"),
        (f"{WRITERS}:write_file:after", "old"),
        (f"{STORE}:write_share:after", "old"),
        (f"{STORE}:write_whole:after", "old"),
        (f"{FOLDERS}:_publish:before", "old"),
        (f"{FOLDERS}:sync_folder:before", "old"),
        (f"{FOLDERS}:_publish:after", "new"),
    ],
)
def test_a_kill_at_each_point_of_replacing_the_only_step(writers, tmp_path, point, survives):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1), {"step": 1})
    wait_until_gone(start(writers, tmp_path, point))
    restored = Checkpointer(tmp_path).restore(TARGET)
    wanted = 1 if survives == "old" else 99
    assert restored.meta == {"step": wanted}
    assert restored.state["w"].tobytes() == state_of(wanted)["w"].tobytes()
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_a_kill_between_the_two_renames_of_a_replacement(tmp_path):
    """The old step is then beside an empty place; the next start puts it back."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1), {"step": 1})
    step = tmp_path / "step_00000001"
    step.rename(tmp_path / "step_00000001.old-0123abcd-77")
    (tmp_path / "step_00000001.tmp-0123abcd-77").mkdir()
    assert Checkpointer(tmp_path).restore(TARGET).meta == {"step": 1}
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_a_killed_delete_is_finished(tmp_path):
    """Deleting renames first: what a kill leaves is no torn step but a leftover."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.save(2, state_of(2))
    torn = (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.tmp-0123abcd-77")
    (torn / "MANIFEST.json").unlink()
    assert Checkpointer(tmp_path).steps() == [2]
    assert os.listdir(tmp_path) == ["step_00000002"]
