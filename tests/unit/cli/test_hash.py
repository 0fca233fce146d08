"""`cyxjax hash`: equal runs are called equal; of others, the first step and leaf that differ are named."""

import json

import numpy as np
import pytest

from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.cli import hash as command
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.observe.state_digests import DigestFile, read_digests


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


def test_runs_with_the_same_bits_are_equal_whatever_time_they_took(tmp_path, capsys):
    one, other = run(tmp_path / "a", [2, 4]), run(tmp_path / "b", [2, 4, 6])
    assert command.main([str(one), str(other)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "equal: every bit of 2 checkpoints, the last of step 4",
        f"not compared: {other} goes on to step 6",
    ]


def test_the_first_step_and_leaf_that_differ_are_named(tmp_path, capsys):
    # -0.0 is equal to 0.0 as a number, not as bits
    one = run(tmp_path / "a", [2, 4, 6], exact={"machine": "8 threads"})
    other = run(tmp_path / "b", [2, 4, 6], bias=-0.0, exact={"machine": "2 threads"})
    assert command.main([str(one), str(other)]) == 1
    said = capsys.readouterr().out
    assert "step 4: 1 of 2 leaves differ, the first is params/dense/bias" in said
    assert "they were equal at step 2" in said
    assert "machine differs: 8 threads and 2 threads" in said


def test_what_was_configured_otherwise_is_named(tmp_path, capsys):
    # where a run is kept makes no other numbers
    told = {"optimizer": {"name": "adam", "lr": 0.1}, "reproducibility": "exact", "run_dir": "a", "seed": 1}
    plain = {"optimizer": {"name": "adam", "lr": 0.2}, "reproducibility": "none", "run_dir": "b"}
    one = run(tmp_path / "a", [4], config=told)
    assert command.main([str(one), str(run(tmp_path / "b", [4], bias=1.0, config=plain))]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "optimizer.lr differs: 0.1 and 0.2",
        "reproducibility differs: 'exact' and 'none'",
        "seed differs: 1 and not given",
    ]


@pytest.mark.parametrize("other", [{"losses": [1.5]}, {"norms": [0.5]}])
def test_another_history_is_a_difference(tmp_path, capsys, other):
    one, other = run(tmp_path / "a", [2]), run(tmp_path / "b", [2], **other)
    assert command.main([str(one), str(other)]) == 1
    assert "step 2: the history differs" in capsys.readouterr().out


def kept(folder, bias, *, begin=0, steps=(1, 2, 3), tail=""):
    """A run with checkpoints, and digests of the steps between; its bias is `bias` from step 2 on."""
    path = run(folder, [4], bias=float(bias)) / "bits.jsonl"
    file = DigestFile(path, pytest.fail)
    file.begin(begin)
    for step in steps:
        file.add(step, {"params/bias": str(bias if step >= 2 else 0), "params/kernel": "7"})
    path.write_text(path.read_text() + tail)
    return folder


def test_digests_kept_on_the_way_name_the_first_step_that_differs(tmp_path, capsys):
    assert command.main([str(kept(tmp_path / "a", 1)), str(kept(tmp_path / "b", 2))]) == 1
    said = capsys.readouterr().out
    assert "step 4: 1 of 2 leaves differ" in said
    assert "step 2 is the first that differs, in params/bias; at step 1 they were equal" in said


def test_runs_without_a_common_checkpoint_are_compared_by_their_digests(tmp_path, capsys):
    one, other = kept(tmp_path / "a", 1), kept(tmp_path / "b", 1, steps=(1, 2))
    (other / "checkpoints" / "step_00000004").rename(other / "checkpoints" / "step_00000005")
    assert command.main([str(one), str(other)]) == 0
    assert "equal: digests of 2 steps, the last 2" in capsys.readouterr().out


def test_digests_of_a_course_that_was_given_up_do_not_count(tmp_path):
    # the run came to step 3, then went on from step 1 and came to step 2 alone; a line was torn
    again = '{"begin": 1}\n{"step": 2, "leaves": {"params/bias": "9"}}\n{"step": 3, "lea'
    found = read_digests(kept(tmp_path / "a", 1, tail=again) / "bits.jsonl")
    assert {step: leaves["params/bias"] for step, leaves in found.items()} == {1: "0", 2: "9"}
    assert read_digests(tmp_path / "none") == {}


def test_digests_after_the_last_common_checkpoint_are_compared_too(tmp_path, capsys):
    one, other = kept(tmp_path / "a", 1), kept(tmp_path / "b", 1)
    for folder, digest in ((one, "8"), (other, "9")):
        DigestFile(folder / "bits.jsonl", pytest.fail).add(5, {"params/bias": digest})
    assert command.main([str(one), str(other)]) == 1
    said = capsys.readouterr().out
    assert "step 5 is the first that differs, in params/bias; at step 3 they were equal" in said
    assert "equal: every bit of 1 checkpoints, the last of step 4" in said


def test_what_cannot_be_compared_is_named(tmp_path):
    one, other = run(tmp_path / "a", [2, 4]), run(tmp_path / "b", [2, 4])
    (damaged,) = (other / "checkpoints" / "step_00000004" / "arrays").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="/b: step 4 .*207 bytes.* 208.*_00000004"):
        command.main([str(one), str(other)])
    with pytest.raises(CheckpointError, match=r"\[2, 4\] and \[3\]"):
        command.main([str(one), str(run(tmp_path / "c", [3]))])
    with pytest.raises(CheckpointError, match=f"^{tmp_path} "):
        command.main([str(tmp_path)])
    with pytest.raises(ConfigError, match="unrecognized"):
        command.main([str(one)] * 3)


def test_one_run_shows_its_newest_step_or_all(tmp_path, capsys):
    folder = run(tmp_path / "a", [2, 4], exact={"canary": "abc"})
    assert command.main([str(folder), "--json"]) == 0
    (newest,) = json.loads(capsys.readouterr().out)["steps"]
    assert (newest["step"], newest["exact"]) == (4, {"canary": "abc"})
    assert newest["leaves"].keys() == {"params/dense/bias", "params/dense/kernel"}
    assert command.main([str(folder), "--all"]) == 0
    second, first = newest["digest"][:12], command.read_bits(folder, 2).digest[:12]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said[::2]] == [f"step 2: {first}", f"step 4: {second}"]
    assert said[1] == said[3] == "    canary: abc"
