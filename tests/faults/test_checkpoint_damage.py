"""A damaged checkpoint is named and set aside, and the next older one is used; never a silent restart."""

import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import MANIFEST, decode, find_problems
from cyxjax.checkpoint.store import StepStore
from cyxjax.errors import CheckpointError

TARGET = {"kernel": np.zeros((40, 50), np.float32), "count": np.zeros((), np.int32)}


def state_of(step):
    return {"kernel": np.random.default_rng(step).random((40, 50), np.float32), "count": np.int32(step)}


def assert_is_step(restored, step):
    assert restored.step == step
    assert restored.meta == {"step": step}
    for name, array in state_of(step).items():
        assert restored.state[name].tobytes() == array.tobytes()


def save_steps(directory, steps, **options):
    with Checkpointer(directory, async_save=False, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), {"step": step})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Steps 1 and 2, created once and copied for each test."""
    directory = tmp_path_factory.mktemp("pristine")
    save_steps(directory, [1, 2])
    return directory


def files_of(directory, step):
    return sorted(path for path in step_folder(directory, step).rglob("*") if path.is_file())


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": os.unlink,
    "a bit": lambda path: flip(path, 4 * path.stat().st_size),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damaged_file_is_found_and_the_older_step_used(pristine, tmp_path, damage):
    for number, path in enumerate(files_of(pristine, 2)):
        run = Path(shutil.copytree(pristine, tmp_path / str(number)))
        DAMAGE[damage](run / path.relative_to(pristine))
        warnings: list[str] = []
        checkpointer = Checkpointer(run, warn=warnings.append)
        assert_is_step(checkpointer.restore(TARGET), 1)
        (line,) = warnings
        (aside,) = run.glob("step_00000002.corrupt-*")
        assert re.search(f"step 2 .*{path.name}.*{aside.name}", line)
        assert sorted(os.listdir(run)) == ["step_00000001", aside.name]
        checkpointer.save(2, state_of(2), {"step": 2})  # the number is free again
        assert_is_step(checkpointer.restore(TARGET), 2)


def test_no_flipped_bit_is_silent(run):
    rng = random.Random(0)
    for path in files_of(run, 2):
        num_bits = 8 * path.stat().st_size
        for bit in {0, num_bits - 1, *(rng.randrange(num_bits) for _ in range(50))}:
            flip(path, bit)
            assert find_problems(step_folder(run, 2), 2), f"bit {bit} of {path.name}"
            flip(path, bit)
    assert find_problems(step_folder(run, 2), 2) == []


def test_no_flipped_bit_of_the_manifest_is_silent(run):
    data = (step_folder(run, 2) / MANIFEST).read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match=MANIFEST):
            decode(bytes(changed))


def test_without_a_good_step_it_is_an_error_that_lists_them_and_no_silent_start(run):
    DAMAGE["empty"](step_folder(run, 2) / MANIFEST)
    Checkpointer(run, warn=lambda line: None).restore(TARGET)  # which sets it aside
    DAMAGE["cut"](step_folder(run, 1) / MANIFEST)
    step_folder(run, 3).mkdir()
    names = sorted(os.listdir(run))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"(?s)step 3:.*step 1:.*step_00000002\.corrupt-"):
            Checkpointer(run).restore(TARGET)
        assert sorted(os.listdir(run)) == names
    for step in (1, 3):
        shutil.rmtree(step_folder(run, step))
    with pytest.raises(CheckpointError, match=r"step_00000002\.corrupt-"):
        Checkpointer(run).restore(TARGET)


def test_a_half_copied_or_empty_step_is_no_step(run):
    step_folder(run, 3).mkdir()
    shutil.copytree(step_folder(run, 2) / "arrays", step_folder(run, 4) / "arrays")
    warnings: list[str] = []
    checkpointer = Checkpointer(run, warn=warnings.append)
    assert checkpointer.steps() == [1, 2]
    assert_is_step(checkpointer.restore(TARGET), 2)
    assert [("step 4" in line, "step 3" in line) for line in warnings] == [(True, False), (False, True)]


def test_a_step_under_another_number_is_refused(run):
    step_folder(run, 2).rename(step_folder(run, 9))
    assert find_problems(step_folder(run, 9), 9) == ["its manifest is of step 2"]


def test_a_file_too_many_is_found(run):
    (step_folder(run, 2) / "arrays" / "extra").write_bytes(b"x")
    assert find_problems(step_folder(run, 2), 2) == ["'arrays/extra' is not in the manifest"]


def test_a_reader_and_a_restore_of_one_step_set_nothing_aside(run):
    DAMAGE["empty"](step_folder(run, 2) / MANIFEST)
    for step in (2, 7):
        with pytest.raises(CheckpointError, match=rf"step {step}: .*{MANIFEST}"):
            Checkpointer(run).restore(TARGET, step=step)
    warnings: list[str] = []
    assert_is_step(Checkpointer(run, is_writer=False, warn=warnings.append).restore(TARGET), 1)
    assert step_folder(run, 2).exists()
    assert len(warnings) == 1


@pytest.mark.parametrize(("steps", "gone"), [([1, 2], []), ([1, 2, 3], [1])])
def test_the_only_good_step_is_never_deleted(tmp_path, steps, gone):
    save_steps(tmp_path, steps)
    flip(max(files_of(tmp_path, steps[-1]), key=lambda path: path.stat().st_size), 100)
    assert StepStore(tmp_path, is_writer=True).prune(1, 0, "min") == gone
    assert_is_step(Checkpointer(tmp_path, warn=lambda line: None).restore(TARGET), steps[-2])
