"""What a resumed run says of data and code that changed since its checkpoint."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.errors import DesyncError
from cyxjax.train import comparison, fingerprints
from cyxjax.train.feeding.fit_data import FitData
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import X, Y, config, mlp, trainer

pytestmark = pytest.mark.usefixtures("two_devices")


def fit(folder, x=X, y=Y, **values):
    trainer().fit(
        x, y, config(checkpoint_dir=str(folder), checkpoint_every_n_epochs=1, resume="auto", **values)
    )


def test_a_resume_on_the_same_data_and_code_says_nothing(tmp_path, capsys):
    fit(tmp_path, epochs=1)
    fit(tmp_path, epochs=2)
    assert "WARNING" not in capsys.readouterr().err
    step = list_steps(tmp_path)[-1]
    kept = read_manifest(step_folder(tmp_path, step)).meta[comparison.META]
    assert kept["data"]["training data"]["samples"] == len(X)
    assert "the code of cyxjax/core" in kept["code"]
    assert len(json.dumps(kept)) < 8000  # in every manifest


def test_a_resume_on_other_data_names_what_changed(tmp_path, capsys):
    fit(tmp_path, epochs=1)
    other = Y.copy()
    other[0] = (other[0] + 1) % 3
    fit(tmp_path, y=other, epochs=2)
    said = capsys.readouterr().err
    assert "WARNING: the training data changed since the checkpoint: sample 0: int32[1]" in said
    assert said.count("WARNING: the training data changed") == 1


def test_other_files_of_the_users_are_named_at_a_resume_and_at_a_load(tmp_path, capsys, monkeypatch):
    own = {"nets": ("1" * 12, "/home/me/nets.py"), "blocks": ("2" * 12, "/home/me/blocks.py")}
    for module in (comparison, fingerprints):
        monkeypatch.setattr(module, "own_modules", lambda: own)
    fit(tmp_path, epochs=1)
    own["plots"] = "3" * 12, "/home/me/plots.py"  # was not there then: nothing to compare
    trainer().load_checkpoint(str(tmp_path))
    assert "WARNING" not in capsys.readouterr().err
    own["blocks"] = "4" * 12, "/home/me/blocks.py"
    trainer().load_checkpoint(str(tmp_path))
    said = capsys.readouterr().err
    assert "WARNING: /home/me/blocks.py changed since the checkpoint was written: what is loaded" in said
    assert "nets.py" not in said
    assert "HINT: go back to the code of then" in said
    rooms = comparison.code_facts() | {"the code of cyxjax/core": "0" * 12}
    monkeypatch.setattr(comparison, "code_facts", lambda: rooms)
    fit(tmp_path, epochs=2)
    said = capsys.readouterr().err
    assert "WARNING: changed since the checkpoint: the code of cyxjax/core, /home/me/blocks.py." in said


def test_shapes_of_a_batch_are_known_without_reading_one():
    class Counted:
        reads = 0

        def __len__(self):
            return 60

        def take(self, indices):
            self.reads += len(indices)
            return X[indices], Y[indices]

    data = Counted()
    one = fingerprints.OneSample(data)
    inputs, targets = one.take(np.arange(16))
    assert (inputs.shape, targets.shape, data.reads, len(one)) == ((16, 6), (16,), 1, 60)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_ranks_that_evaluate_or_predict_other_samples_are_refused(call, monkeypatch):
    """Each rank takes its share of what it was given: of unlike arrays the parts belong to no one set."""
    one = trainer()
    one.fit(X, Y, config())
    run = (lambda x: one.evaluate(x, Y[: len(x)])) if call == "evaluate" else one.predict
    notes = []
    group = SimpleNamespace(topology=SimpleNamespace(world_size=2, is_master=True))
    monkeypatch.setattr(one, "_group", group)
    monkeypatch.setattr(
        comparison, "agree", lambda group, call, note: notes.append(note) or notes[:1] + [note]
    )
    run(X)
    run(X.copy())
    with pytest.raises(DesyncError, match=f"{call}: .*60 .*30 "):
        run(X[::2])
    with pytest.raises(DesyncError, match=f"{call}: sample 0"):
        run(X + 1)


def batches(x, y=None):
    return [(x[i : i + 8], (Y if y is None else y)[i : i + 8]) for i in range(0, len(x), 8)]


def test_ranks_whose_loaders_begin_with_the_same_samples_are_refused(monkeypatch):
    """What torch's DDP trains on in silence where the DistributedSampler was forgotten."""
    told = []
    monkeypatch.setattr(comparison, "agree", lambda group, call, note: told.append(note) or told)
    monkeypatch.setattr(comparison, "compare_facts", lambda *facts: None)
    ranks = SimpleNamespace(topology=SimpleNamespace(world_size=2))

    def start(loader):
        data = FitData(loader, None, False, first=(loader[0],))
        comparison.compare_ranks(ranks, fingerprints.Facts({}), data, None)

    start(batches(X))
    start(batches(X[8:], Y[8:]))
    with pytest.raises(DesyncError, match="loaders .* 0 .* 2 .*DistributedSampler"):
        start(batches(X.copy()))
    told.clear()
    for _ in range(2):  # rows that are all alike tell of no rank
        start(batches(np.ones((16, 3), np.float32), np.zeros(16, np.int32)))


def test_loaders_whose_ranks_have_other_programs_for_batches_of_one_shape_are_refused():
    """A loss or a metric that asks for its rank: what each rank counts would silently differ."""
    refuse = comparison.refuse_other_programs
    refuse([("(3, 4)", "aa"), ("(2, 4)", "bb"), ("(3, 4)", "aa")])
    with pytest.raises(DesyncError, match="program.*aa .*rank 0.*cc .*rank 2"):
        refuse([("(3, 4)", "aa"), ("(2, 4)", "bb"), ("(3, 4)", "cc")])


@pytest.mark.parametrize(
    ("name", "other"),
    [("optimizer", cx.SGDOptimizer(0.2)), ("callbacks", cx.EMA())],
)
def test_ranks_whose_optimizer_or_callbacks_differ_are_named_it(name, other, monkeypatch):
    """Their compiled steps differ too, and a digest of a program names nothing."""
    given = {"optimizer": cx.SGDOptimizer(0.1), "callbacks": []}
    given_elsewhere = given | {name: [other] if name == "callbacks" else other}
    facts, elsewhere = (
        DistributedTrainer(mlp(), cx.CrossEntropyLoss(), **one).prepare(X, Y, config=config()).facts
        for one in (given, given_elsewhere)
    )
    notes = [
        {"config": fingerprints.equal_on_ranks(one.config), "data": {}, "step": step, "exact": {}}
        for one, step in ((facts, "a"), (elsewhere, "b"))
    ]
    monkeypatch.setattr(comparison, "agree", lambda *call, **note: notes)
    group = SimpleNamespace(topology=SimpleNamespace(is_master=True))
    with pytest.raises(DesyncError, match=f"{name} .*configuration"):
        comparison.compare_facts(group, facts, "a")
