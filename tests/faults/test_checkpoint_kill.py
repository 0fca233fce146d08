"""SIGKILL at random and at chosen moments of a save: a step reported as saved exists, bit for bit."""

import multiprocessing
import os
import random
import time

import numpy as np
import pytest

from cyxjax.checkpoint import folders
from cyxjax.checkpoint.checkpointer import Checkpointer
from tests.faults.checkpoint_writer import NUM_FLOATS, save_and_die, save_without_end, state_of
from tests.support import forked

TARGET = {"w": np.zeros(NUM_FLOATS, np.float32), "step": np.zeros((), np.int32)}
STORE, WRITERS = "cyxjax.checkpoint.store", "cyxjax.checkpoint.writers"
FOLDERS = "cyxjax.checkpoint.folders"

pytestmark = pytest.mark.multiprocess


def kill_while_saving(folder, num_saves, delay_s):
    """The last step that the job reported; -1 if it was killed before the first one was on disk."""
    hears, tells = multiprocessing.Pipe(duplex=False)
    job = forked.server().Process(target=save_without_end, args=(str(folder), tells))
    job.start()
    # One report per started save, so that a slow machine interrupts as many saves as a fast one.
    steps = [hears.recv() for _ in range(num_saves)]
    time.sleep(delay_s)
    job.kill()
    job.join()
    while hears.poll():
        steps.append(hears.recv())
    hears.close()
    tells.close()
    return steps[-1]


def leftovers(folder):
    return [name for name in os.listdir(folder) if ".tmp-" in name or ".old-" in name]


def test_thirty_kills_lose_nothing_that_was_reported(tmp_path):
    rng = random.Random(3)
    half_written, last = 0, -1
    for _ in range(30):
        reported = kill_while_saving(tmp_path, rng.choice([1, 1, 1, 2, 3]), rng.uniform(0, 0.1))
        half_written += bool(leftovers(tmp_path))
        warnings: list[str] = []
        restored = Checkpointer(tmp_path, warn=warnings.append).restore(TARGET)
        assert leftovers(tmp_path) == []  # removed, as by the next start of the job
        assert restored is not None or last == reported == -1
        if restored is not None:
            assert restored.step >= max(last, reported)
            assert restored.meta == {"step": restored.step}
            assert restored.state["w"].tobytes() == state_of(restored.step)["w"].tobytes()
            last = restored.step
        assert warnings == []
    assert half_written >= 5  # else the kills missed the saves, and the test proves nothing
    assert last >= 5


@pytest.mark.parametrize(
    ("point", "survives"),
    [
        (f"{WRITERS}:write_share:before", "old"),
        (f"{WRITERS}:write_file:after", "old"),
        (f"{WRITERS}:write_share:after", "old"),
        (f"{STORE}:write_whole:after", "old"),
        (f"{FOLDERS}:_publish:before", "old"),
        (f"{FOLDERS}:sync:before", "old"),
        (f"{FOLDERS}:_publish:after", "new"),
    ],
)
def test_a_kill_at_each_point_of_replacing_the_only_step(tmp_path, point, survives):
    Checkpointer(tmp_path, async_save=False).save(1, state_of(1), {"step": 1})
    job = forked.server().Process(target=save_and_die, args=(str(tmp_path), point))
    job.start()
    job.join()
    assert job.exitcode == -9
    restored = Checkpointer(tmp_path).restore(TARGET)
    wanted = 1 if survives == "old" else 99
    assert restored.meta == {"step": wanted}
    assert restored.state["w"].tobytes() == state_of(wanted)["w"].tobytes()
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_a_kill_between_the_two_renames_where_files_have_no_locks(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1))
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.old-0123abcd-77")
    monkeypatch.setattr(folders, "try_flock", lambda fd: False)
    assert Checkpointer(tmp_path).restore(TARGET).step == 1


def test_a_kill_between_the_two_renames_of_a_replacement_or_while_a_step_is_deleted(tmp_path):
    """The old step was set aside, and the next start restores it; a half-deleted step is deleted."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1), {"step": 1})
        checkpointer.save(2, state_of(2))
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.old-0123abcd-77")
    (tmp_path / "step_00000001.tmp-0123abcd-77").mkdir()
    torn = (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.tmp-0123abcd-77")
    (torn / "MANIFEST.json").unlink()
    assert Checkpointer(tmp_path).restore(TARGET).meta == {"step": 1}
    assert os.listdir(tmp_path) == ["step_00000001"]
