"""The history: a JSON round trip, only complete files, and a plot."""

import math

import numpy as np
import pytest

from cyxjax.errors import DataError
from cyxjax.observe.history import DistributedTrainingHistory
from tests.support.calls import calls_of
from tests.support.refusals import refused_in_a_line


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
    path = tmp_path / "h.json"
    history = example()
    history.train_losses = [math.nan, math.inf, np.float32(0.5)]  # type: ignore[list-item]
    history.metrics = {"val_top2": [None, 0.5, math.nan], "val_table": [[[1.0, 0.0], [0.0, 1.0]]]}
    history.save(path)
    again = DistributedTrainingHistory.load(path)
    assert str(again) == str(history).replace("np.float32(0.5)", "0.5")
    before = path.read_text()
    assert '"nan"' in before  # NaN is not JSON
    history.stopped_by = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        history.save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["h.json"]  # no temporary file left


def test_a_long_history_is_made_plain_in_as_many_calls_as_a_short_one():
    def calls(epochs):
        values = [0.5] * epochs
        history = DistributedTrainingHistory(train_losses=values, val_losses=values)
        count, found = calls_of(history.to_dict), history.to_dict()
        assert found["train_losses"] == values
        assert found["train_losses"] is not values  # a copy, which later epochs do not change
        return count

    assert calls(3000) == calls(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"h\.json: .*JSON"),
        ("[1]", r"h\.json: .*list"),
        ("[" * 200_000, r"h\.json: "),
        ('{"train_loss": [1]}', r"h\.json: .*\btrain_loss\b"),
        ('{"train_losses": 3}', r"h\.json: .*\btrain_losses\b.*input_value=3"),
        ('{"world_size": "two"}', r"h\.json: .*\bworld_size\b.*'two'"),
        ('{"metrics": [1]}', r"h\.json: .*\bmetrics\b"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, message):
    (tmp_path / "h.json").write_text(text)
    with refused_in_a_line(DataError, match=message):
        DistributedTrainingHistory.load(tmp_path / "h.json")


def test_a_plot_draws_each_curve_of_each_history(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'cyxjax[plot]'")
    drawn = example().plot(tmp_path / "h.svg", {"lr 0.1": example(), "lr 0.2": example()}).read_text()
    for label in ("train", "lr 0.1 train", "lr 0.2 train", "lr 0.1 validation"):
        assert drawn.count(f"<!-- {label} -->") == 2, label  # loss and accuracy
    assert example().plot()._repr_png_().startswith(b"\x89PNG")  # for notebooks


TABLE = DistributedTrainingHistory(
    train_losses=[3.0, 2.0, 1.0],
    learning_rates=[0.1, 0.1, 0.2],
    epochs=[0, 1, 2],
    val_losses=[2.5, 1.5],
    val_epochs=[0, 2],
    metrics={
        "train_top2": [0.1, 0.2, 0.3],
        "val_top2": [0.5, 0.6],
        "train_added_later": [None, 0.7, 0.8],
        "train_removed": [0.9],
    },
)


def test_a_notebook_shows_a_history_as_a_table():
    html = TABLE._repr_html_()
    assert html.count("<tr") == 1 + 3
    assert "<td>1</td><td>3</td><td>0.1</td><td>2.5</td>" in html  # epochs count from 1
    many = DistributedTrainingHistory(train_losses=[1.0] * 100, epochs=[*range(100)])
    assert many._repr_html_().count("<tr") == 1 + 6 + 1 + 6


def test_rows_are_epochs_without_what_was_not_measured():
    assert TABLE.rows() == [
        {
            "epoch": 0,
            "train_loss": 3.0,
            "learning_rate": 0.1,
            "val_loss": 2.5,
            "train_top2": 0.1,
            "train_removed": 0.9,
            "val_top2": 0.5,
        },
        {"epoch": 1, "train_loss": 2.0, "learning_rate": 0.1, "train_top2": 0.2, "train_added_later": 0.7},
        {
            "epoch": 2,
            "train_loss": 1.0,
            "learning_rate": 0.2,
            "val_loss": 1.5,
            "train_top2": 0.3,
            "train_added_later": 0.8,
            "val_top2": 0.6,
        },
    ]
    assert DistributedTrainingHistory().rows() == []


def test_a_data_frame_has_a_row_an_epoch():
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    assert TABLE.to_pandas().equals(pandas.DataFrame(TABLE.rows()))
