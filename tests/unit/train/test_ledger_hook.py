"""A run records the samples that it read; `cyxjax audit` finds the one manipulated batch.

A resumed run continues with the next sample, at any batch and world size.
"""

import json
import os
from unittest.mock import Mock

import pytest
from flax import linen

from cyxjax.cli import audit
from cyxjax.data.ledger_file import read_ledger
from cyxjax.data.order import Order
from cyxjax.errors import DataError
from cyxjax.train.hooks import ledger
from tests.support.trainers import X, Y, batches, does, fitted, loaded, use_devices

pytestmark = pytest.mark.usefixtures("two_devices")

SAMPLES = 50  # 16 a step: 4 steps an epoch, the last of 2 samples
ONE_SAVE = {"global_batch_size": None, "checkpoint_every_n_steps": 100, "verbose": True}


def fit(folder, replicas=None, one=None, **changes):
    if replicas is not None:
        use_devices(replicas)
    options = {"epochs": 3, "batch_size": None, "global_batch_size": 16, "checkpoint_every_n_steps": 5}
    data = X[:SAMPLES], Y[:SAMPLES]
    return fitted(data=data, run_dir=str(folder), report=False, one=one, **options | changes)


def places(folder):
    """(epoch, first, stop) of each recorded span."""
    return [record.span[:3] for record in read_ledger(folder / "ledger.jsonl").records]


def tamper(monkeypatch, bad_step, change):
    """Makes the step `bad_step` (counted over epochs of 4) read `change(ids)`."""
    real = Order.__getitem__
    first = bad_step % 4 * 16

    def reading(self, places):
        ids = real(self, places)
        if self.epoch == bad_step // 4:
            ids[places == first] = change(ids[places == first])
        return ids

    monkeypatch.setattr(Order, "__getitem__", reading)


def test_a_program_that_changes_its_folder_while_it_trains_keeps_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # and back afterwards
    fitted(does(on_epoch=lambda self, info: os.chdir("/")), run_dir="run")
    assert (tmp_path / "run" / "history.json").is_file()
    assert audit.main([str(tmp_path / "run")]) == 0


def test_a_run_resumed_in_the_middle_of_an_epoch_is_whole(tmp_path, monkeypatch, printed):
    fit(tmp_path, max_steps=7)
    with monkeypatch.context() as patch:  # while it is audited
        patch.setattr(
            "cyxjax.train.runs.audit.read_ledger", lambda path: (read_ledger(path), fit(tmp_path))[0]
        )
        assert audit.main([str(tmp_path)]) == 0
    shown = printed(audit.main, tmp_path)
    assert "3 epochs of 50 samples, 150 in all" in shown
    assert "every sample came once per epoch: " in shown
    # a span ends at every save (steps 5, 7, 10 and the end) and at the end of an epoch
    assert places(tmp_path) == [(0, 0, 50), (1, 0, 16), (1, 16, 48), (1, 48, 50), (2, 0, 32), (2, 32, 50)]
    *lines, last = (tmp_path / "ledger.jsonl").read_text().splitlines()
    changed = json.dumps(json.loads(last) | {"sum": "0" * 16})
    (tmp_path / "ledger.jsonl").write_text("\n".join([*lines, changed]) + "\n")
    assert "the checkpoint of step 12 was trained on other samples" in printed(audit.main, tmp_path, code=1)


def test_steps_made_again_count_once_and_damage_is_mended_at_the_resume(tmp_path, capsys, printed):
    fit(tmp_path, max_steps=7)
    # As if it had died before its last save: the save of step 5 is the newest.
    (newest,) = (tmp_path / "checkpoints").glob("step_*7")
    newest.rename(tmp_path / "gone")
    fit(tmp_path, max_steps=11)
    assert "13 steps, 2 of them repeated after a restart" in printed(audit.main, tmp_path)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2].replace('"samples": 16', '"samples": 17')
    path.write_text("\n".join(lines) + "\n")
    assert audit.main([str(tmp_path)]) == 1
    fit(tmp_path, verbose=True)
    assert "11 steps before the checkpoint; they were written again" in capsys.readouterr().out
    assert audit.main([str(tmp_path)]) == 0


def test_one_sample_read_in_the_place_of_another_is_found(tmp_path, monkeypatch, printed):
    with monkeypatch.context() as patched:
        tamper(patched, 6, lambda ids: (ids + 1) % SAMPLES)
        fit(tmp_path)
    lines = printed(audit.main, tmp_path, code=1).splitlines()
    assert lines[0].startswith(
        "step 6: altered: steps 6 to 8 have 34 samples that are not the 34 of places 16"
    )
    assert len(lines) == 2
    report = json.loads(printed(audit.main, tmp_path, "--json", code=1))
    assert (report["good"], len(report["findings"])) == (False, 1)


@pytest.mark.parametrize("start", ["resume", "load"])
def test_a_changed_seed_is_told_at_the_start_and_by_the_audit(start, tmp_path, capsys, printed):
    fit(tmp_path / "source", max_steps=6)  # two steps into epoch 1
    one = loaded(tmp_path / "source" / "checkpoints", model=linen.Dense(3)) if start == "load" else None
    run = tmp_path / ("source" if one is None else "run")
    fit(run, one=one, seed=1, verbose=True)
    shown = capsys.readouterr().out
    assert "WARNING: the order of samples changed after 32 samples of epoch 2" in shown
    shown = printed(audit.main, run, code=1)
    assert "reordered: the order was changed after 32 samples of epoch 2" in shown


def test_lines_that_a_full_disk_refused_are_not_written_by_the_next_fit(tmp_path, monkeypatch, printed):
    one = fit(tmp_path, epochs=1)
    with monkeypatch.context() as full:
        full.setattr(ledger, "append", Mock(side_effect=OSError(28, "No space left on device")))
        fit(tmp_path, one=one, epochs=2)
    fit(tmp_path, one=one)
    assert "every sample came once per epoch" in printed(audit.main, tmp_path)


def test_the_record_of_a_loaded_state_begins_where_it_was_loaded(tmp_path, capsys, printed):
    source, folder = tmp_path / "source", tmp_path / "run"
    fit(source, epochs=1)
    fit(source, epochs=2, seed=1, global_batch_size=24)  # two orders: no record of them can be made again
    fit(folder, one=loaded(source / "checkpoints", model=linen.Dense(3)))
    for epochs in (3, 4):
        capsys.readouterr()
        fit(folder, epochs=epochs, verbose=True)
        assert "lost" not in capsys.readouterr().out
        assert "from sample 0 of epoch 3 on" in printed(audit.main, folder)
    (folder / "ledger.jsonl").unlink()
    fit(folder, epochs=5, verbose=True)
    assert "8 steps before the checkpoint; they were written again" in capsys.readouterr().out
    assert audit.main([str(folder)]) == 0


def test_loaders_have_no_ids_and_leave_no_ledger(tmp_path):
    fitted(data=(batches(X, Y, 16), None), run_dir=str(tmp_path), epochs=1)
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(DataError, match=r"ledger\.jsonl"):
        audit.main([str(tmp_path)])


# ---- another size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"),  # (samples a replica, replicas)
    [((8, 1), (8, 2)), ((8, 2), (64, 1)), ((7, 2), (8, 1))],
)
def test_another_size_goes_on_at_exactly_the_next_sample(tmp_path, capsys, printed, first, then):
    fit(tmp_path, first[1], batch_size=first[0], max_steps=6, **ONE_SAVE)
    before_it = places(tmp_path)
    capsys.readouterr()
    fit(tmp_path, then[1], batch_size=then[0], **ONE_SAVE)
    epoch, _, stop = before_it[-1]
    whole = stop == SAMPLES
    assert places(tmp_path)[len(before_it)][:2] == ((epoch + 1, 0) if whole else (epoch, stop))
    shown = capsys.readouterr().out
    assert f"epoch {epoch + whole + 1}, sample {0 if whole else stop})" in shown
    assert "3 epochs of 50 samples, 150 in all" in printed(audit.main, tmp_path)


def test_drop_last_at_another_size_leaves_out_less_than_one_of_its_steps(tmp_path, printed):
    fit(tmp_path, batch_size=8, max_steps=2, drop_last=True, **ONE_SAVE)
    fit(tmp_path, batch_size=12, max_steps=5, drop_last=True, **ONE_SAVE)
    assert places(tmp_path) == [(0, 0, 32), (1, 0, 48), (2, 0, 24)]  # 18 left: no step of 24
    assert "drop_last" in printed(audit.main, tmp_path)
