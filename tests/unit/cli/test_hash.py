"""`cyxjax hash`: equal runs are reported equal; otherwise it names the first step and leaf that differ."""

import json

import numpy as np
import pytest

from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.cli import hash as command
from cyxjax.cli.checkpoint import run_of
from cyxjax.errors import CheckpointError
from cyxjax.observe.records import add_line
from cyxjax.observe.state_digests import read_digests


def run(folder, steps, *, bias=0.0, exact=None, losses=(1.0,), norms=(), config=None):
    store = StepStore(folder / "checkpoints", is_writer=True)
    for step in steps:
        arrays = {
            "params/dense/bias": np.array([0.5, bias if step > 2 else 0.0], np.float32),
            "params/dense/kernel": np.ones((2, 2), np.float32),
        }
        history = {"train_losses": list(losses), "total_time_seconds": float(id(folder) % 97)}
        history["grad_norms"] = list(norms)
        meta = {"history": history, "exact": exact or {}, "config": config or {}}
        store.write(Snapshot(step, arrays, meta, None))
    return folder


BIAS = "1 of 2 leaves differ, the first is params/dense/bias"
NO_EARLIER = "no earlier step has a checkpoint in both"
# the folder of a run does not affect its numbers
RECORDED = {"optimizer": {"name": "adam", "lr": 0.1}, "reproducibility": "exact", "run_dir": "a", "seed": 1}
PLAIN = {"optimizer": {"name": "adam", "lr": 0.2}, "reproducibility": "none", "run_dir": "b"}


@pytest.mark.parametrize(
    ("one", "other", "lines"),
    [
        (
            {"steps": [2, 4]},
            {"steps": [2, 4, 6]},
            [
                "equal: every bit of 2 checkpoints, the last of step 4",
                "not compared: {b} continues to step 6",
            ],
        ),
        (
            {"steps": [2, 4, 6], "exact": {"machine": "8 threads"}},
            {"steps": [2, 4, 6], "bias": -0.0, "exact": {"machine": "2 threads"}},  # 0.0 as a number
            [f"step 4: {BIAS}", "they were equal at step 2", "machine differs: 8 threads and 2 threads"],
        ),
        (
            {"steps": [4], "config": RECORDED},
            {"steps": [4], "bias": 1.0, "config": PLAIN},
            [
                f"step 4: {BIAS}",
                NO_EARLIER,
                "optimizer.lr differs: 0.1 and 0.2",
                "reproducibility differs: 'exact' and 'none'",
                "seed differs: 1 and not given",
            ],
        ),
        ({"steps": [2]}, {"steps": [2], "losses": [1.5]}, ["step 2: the history differs", NO_EARLIER]),
        ({"steps": [2]}, {"steps": [2], "norms": [0.5]}, ["step 2: the history differs", NO_EARLIER]),
    ],
)
def test_the_first_step_and_leaf_that_differ_are_named(tmp_path, printed, one, other, lines):
    folders = [run(tmp_path / "a", **one) / "checkpoints", run(tmp_path / "b", **other)]
    equal = lines[0].startswith("equal")
    shown = printed(command.main, *folders, code=not equal)
    assert shown.splitlines() == [line.format(b=tmp_path / "b") for line in lines]
    assert json.loads(printed(command.main, *folders, "--json", code=not equal))["equal"] is equal


def kept(folder, bias, *, begin=0, steps=(1, 2, 3), tail=""):
    """A run with checkpoints and digests of the steps between them; its bias is `bias` from step 2."""
    path = run(folder, [4], bias=float(bias)) / "bits.jsonl"
    add_line(path, {"begin": begin}, pytest.fail)
    for step in steps:
        leaves = {"params/bias": str(bias if step >= 2 else 0), "params/kernel": "7"}
        add_line(path, {"step": step, "digests": leaves}, pytest.fail)
    path.write_text(path.read_text() + tail)
    return folder


def test_digests_kept_on_the_way_name_the_first_step_that_differs(tmp_path):
    one = kept(tmp_path / "a", 1)
    lines, equal = command.compare(run_of(one), run_of(kept(tmp_path / "b", 2)))
    assert (lines[0], equal) == (f"step 4: {BIAS}", False)
    assert "step 2 is the first that differs, in params/bias; at step 1 they were equal" in lines[1]
    # without a common checkpoint
    other = kept(tmp_path / "c", 1, steps=(1, 2))
    (other / "checkpoints" / "step_00000004").rename(other / "checkpoints" / "step_00000005")
    (line,), equal = command.compare(run_of(one), run_of(other))
    assert (line.partition(";")[0], equal) == ("equal: digests of 2 steps, the last 2", True)
    assert f"{one} continues to step 3" in line
    # after the last common checkpoint
    other = kept(tmp_path / "d", 1)
    for folder, digest in ((one, "8"), (other, "9")):
        add_line(folder / "bits.jsonl", {"step": 5, "digests": {"params/bias": digest}}, pytest.fail)
    lines, equal = command.compare(run_of(one), run_of(other))
    assert "step 5 is the first that differs, in params/bias; at step 3 they were equal" in lines[0]
    assert (lines[1], equal) == ("equal: every bit of 1 checkpoint, the last of step 4", False)


def test_digests_of_a_course_that_was_given_up_do_not_count(tmp_path):
    # the run reached step 3, then continued from step 1 and only reached step 2; the last line is incomplete
    again = '{"begin": 1}\n{"step": 2, "digests": {"params/bias": "9"}}\n{"step": 3, "dig'
    found = read_digests(kept(tmp_path / "a", 1, tail=again) / "bits.jsonl")
    assert {step: leaves["params/bias"] for step, leaves in found.items()} == {1: "0", 2: "9"}
    assert read_digests(tmp_path / "none") == {}


def test_what_cannot_be_compared_is_named(tmp_path):
    one, other = run(tmp_path / "a", [2, 4]), run(tmp_path / "b", [2, 4])
    (damaged,) = (other / "checkpoints" / "step_00000004" / "arrays").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (run(tmp_path / "d", [3]) / "checkpoints" / "step_00000003").rename(
        tmp_path / "d" / "checkpoints" / "step_00000003.corrupt-20260101-000000-000000"
    )
    for folders, message in (
        ([tmp_path / "d"], "/d/checkpoints: "),
        ([one, other], "/b: .*207 bytes.* 208.*_00000004"),
        ([one, run(tmp_path / "c", [3])], r"\[2, 4\] and \[3\]"),
        ([tmp_path], f"^{tmp_path} "),
    ):
        with pytest.raises(CheckpointError, match=message):
            command.main([*map(str, folders)])


def test_one_run_shows_its_newest_step_or_all(tmp_path, printed):
    folder = run(tmp_path / "a", [2, 4], exact={"canary": "abc"})
    (newest,) = json.loads(printed(command.main, folder, "--json"))["steps"]
    assert (newest["step"], newest["exact"]) == (4, {"canary": "abc"})
    assert newest["leaves"].keys() == {"params/dense/bias", "params/dense/kernel"}
    second, first = newest["digest"][:12], command.read_bits(run_of(folder), 2).digest[:12]
    lines = printed(command.main, folder, "--all").splitlines()
    assert [line.partition(" (")[0] for line in lines[::2]] == [f"step 2: {first}", f"step 4: {second}"]
    assert lines[1] == lines[3] == "    canary: abc"
