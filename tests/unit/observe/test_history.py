"""The history: plain JSON and back, whole files only, and a picture."""

import math

import pytest

from cyxjax.errors import DataError
from cyxjax.observe.history import DistributedTrainingHistory


def example():
    return DistributedTrainingHistory(
        train_losses=[2.0, 1.0],
        train_accuracies=[0.25, 0.5],
        val_losses=[1.5],
        val_accuracies=[0.375],
        learning_rates=[0.1, 0.05],
        epochs=[0, 1],
        val_epochs=[1],
        total_time_seconds=2.0,
        samples_per_second=100.0,
        effective_batch_size=128,
        world_size=2,
        num_replicas=4,
    )


def test_save_and_load_give_the_same_value(tmp_path):
    history = example()
    history.save(tmp_path / "history.json")
    again = DistributedTrainingHistory.load(tmp_path / "history.json")
    assert again == history
    assert type(again.epochs[0]) is int
    assert [p.name for p in tmp_path.iterdir()] == ["history.json"]  # no draft left


def test_numbers_that_are_not_finite_survive_strict_json(tmp_path):
    history = DistributedTrainingHistory(train_losses=[math.nan, math.inf, 1.0])
    history.save(tmp_path / "h.json")
    assert '"nan"' in (tmp_path / "h.json").read_text()
    again = DistributedTrainingHistory.load(tmp_path / "h.json")
    assert math.isnan(again.train_losses[0])
    assert again.train_losses[1:] == [math.inf, 1.0]


def test_array_scalars_are_plain_numbers():
    import numpy as np

    history = DistributedTrainingHistory(train_losses=[np.float32(0.5)])  # type: ignore[list-item]
    assert history.to_dict()["train_losses"] == [0.5]
    assert type(history.to_dict()["train_losses"][0]) is float


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "h.json"
    example().save(path)
    before = path.read_text()
    broken = example()
    broken.stopped_by = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a history"),
        ("[1]", "holds a list"),
        ('{"train_loss": [1]}', r"no 'train_loss'\. Did you mean 'train_losses'"),
        ('{"train_losses": 3}', r"train_losses = 3: expected a list"),
        ('{"world_size": "two"}', r"world_size = 'two'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, message):
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        DistributedTrainingHistory.load(tmp_path / "h.json")
    assert "HINT" in str(caught.value)


@pytest.mark.parametrize(("name", "start"), [("h.svg", b"<?xml"), ("h.png", b"\x89PNG")])
def test_plot_draws_each_curve(tmp_path, name, start):
    pytest.importorskip("matplotlib", reason="pip install 'cyxjax[plot]'")
    path = example().plot(tmp_path / name)
    assert path.read_bytes().startswith(start)
    if name.endswith("svg"):
        assert path.read_text().count("<!-- validation -->") == 2


def test_plot_without_epochs_is_refused(tmp_path):
    with pytest.raises(DataError, match="no epoch to draw"):
        DistributedTrainingHistory().plot(tmp_path / "h.svg")
