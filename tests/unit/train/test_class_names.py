"""Labels are integers or booleans; the names of classes are an attribute that checkpoints keep."""

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.errors import CheckpointError, ConfigError, DataError
from cyxjax.train.runs.tables import check_columns, check_names
from tests.support.trainers import CLASSES, VAL, X, Y, config, trainer, use_devices

NAMES = ("cat", "dog", "emu")


@pytest.fixture(autouse=True)
def one_device(own_group):
    use_devices(1)


def test_booleans_are_the_labels_0_and_1():
    yes, integers, booleans = Y == 1, trainer(), trainer()
    expected = integers.fit(X, yes.astype(np.int64), VAL[0], (VAL[1] == 1).astype(np.int64), config())
    found = booleans.fit(X, yes, VAL[0], VAL[1] == 1, config())
    assert found.train_losses == expected.train_losses
    assert found.val_losses == expected.val_losses
    assert found.val_accuracies == expected.val_accuracies
    items = [(x, bool(y)) for x, y in zip(X, yes, strict=True)]
    assert trainer().fit(items, config()).train_losses == pytest.approx(expected.train_losses)


def test_one_hot_rows_of_floats_are_probabilities_and_of_integers_are_refused():
    rows = np.eye(CLASSES)[Y]
    expected = trainer().fit(X, Y, config(shuffle=False)).train_losses
    assert trainer().fit(X, rows, config(shuffle=False)).train_losses == pytest.approx(expected, rel=1e-5)
    with pytest.raises(DataError, match=r"argmax\(-1\)"):
        trainer().fit(X, rows.astype(int), config())


@pytest.mark.parametrize("call", ["fit", "evaluate", "loader"])
def test_strings_are_refused_with_the_line_that_numbers_them(call):
    words = np.array(NAMES)[Y]
    calls = {
        "fit": lambda: trainer().fit(X, words, config()),
        "evaluate": lambda: trainer().evaluate(X, words),
        "loader": lambda: trainer().fit(cx.data.Batches([(X[:8], words[:8])]), config()),
    }
    with pytest.raises(DataError, match=r"np\.unique\(y, return_inverse=True\)"):
        calls[call]()
    class_names, y = np.unique(words, return_inverse=True)
    assert (tuple(class_names.tolist()), y.tolist()) == (NAMES, Y.tolist())


def test_categories_of_a_frame_are_refused_alike():
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    frame = pandas.DataFrame({"a": X[:, 0], "label": pandas.Categorical(np.array(NAMES)[Y])})
    for data in ((frame,), (X, frame["label"])):
        with pytest.raises(DataError, match="np.unique"):
            trainer().fit(*data, config())


def test_class_names_lie_in_checkpoints(tmp_path):
    one, other = trainer(), trainer()
    one.class_names = NAMES
    one.fit(X, Y, config())
    one.save_checkpoint(str(tmp_path / "saved"))
    other.load_checkpoint(str(tmp_path / "saved"))
    assert other.class_names == NAMES
    renamed = trainer()
    renamed.class_names = ("ant", "dog", "emu")
    with pytest.raises(CheckpointError, match=r"cat\W+dog\W+emu.* ant\W+dog\W+emu"):
        renamed.load_checkpoint(str(tmp_path / "saved"))


def test_per_class_metrics_of_an_experiment_have_the_names():
    from cyxjax.config.experiment import TrainConfig
    from cyxjax.data.splits import DatasetInfo
    from cyxjax.train.start.named import metrics_of

    info = DatasetInfo("own", "classification", 3, (6,), class_names=NAMES)
    names = metrics_of(TrainConfig(metrics=[{"name": "per_class", "options": {}}]), info).names
    assert {"recall_cat", "precision_emu"} <= set(names)


def test_names_that_differ_from_those_of_training_are_refused():
    for found in (NAMES, (), ("0", "1", "2")):  # pandas numbers columns that it knows no names of
        check_columns("more.parquet", found, NAMES)
    for found in (NAMES[1:], (*NAMES, "fox"), ("dog", "cat", "emu")):
        with pytest.raises(ConfigError, match=r"more\.csv"):
            check_names("more.csv", "classes", found, NAMES)
