"""The classes that words stand for: trained on, kept, and met again."""

import numpy as np
import pytest

from cyxjax.errors import DataError
from tests.support.trainers import VAL, X, Y, config, trainer, use_devices

NAMES = np.array(["cat", "dog", "emu"])


@pytest.fixture(autouse=True)
def one_device(own_group):
    use_devices(1)


def test_words_one_hot_rows_and_labels_train_alike_and_the_table_is_kept(tmp_path):
    plain, words, hot = trainer(), trainer(), trainer()
    expected = plain.fit(X, Y, *VAL, config())
    said = words.fit(X, NAMES[Y], VAL[0], NAMES[VAL[1]].tolist(), config())
    rows = hot.fit(X, np.eye(3)[Y], VAL[0], np.eye(3)[VAL[1]], config())
    assert said.val_losses == rows.val_losses == expected.val_losses
    assert said.val_accuracies == rows.val_accuracies == expected.val_accuracies
    assert words.class_names == tuple(NAMES)
    assert hot.evaluate(VAL[0], np.eye(3)[VAL[1]]) == plain.evaluate(*VAL)

    # Another process: what it is asked holds two of the classes only, and counts as before.
    words.save_checkpoint(str(tmp_path / "saved"))
    again = trainer()
    again.load_checkpoint(str(tmp_path / "saved"))
    two = VAL[1] > 0
    assert again.class_names == tuple(NAMES)
    assert again.evaluate(VAL[0][two], NAMES[VAL[1][two]]) == plain.evaluate(VAL[0][two], VAL[1][two])
    with pytest.raises(DataError, match="'fox' is none of the 3 classes trained on"):
        again.evaluate(VAL[0][:1], ["fox"])
    with pytest.raises(DataError, match="'fox' is none of the 3 classes"):
        again.fit(X, np.where(Y == 0, "fox", NAMES[Y]), config())


def test_a_run_of_other_classes_does_not_go_on(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    trainer().fit(X, NAMES[Y], config(epochs=1, **kept))
    with pytest.raises(DataError, match="counts the classes cat, dog, emu; these data ant, dog, emu"):
        trainer().fit(X, np.where(Y == 0, "ant", NAMES[Y]), config(**kept))


def test_per_class_metrics_of_an_experiment_have_the_names():
    from cyxjax.config.experiment import TrainConfig
    from cyxjax.data.catalog import as_splits
    from cyxjax.train.start.named import metrics_of

    pair = (X, NAMES[Y])
    info = as_splits("own", (pair, pair, pair)).info
    assert (info.class_names, info.num_classes) == (tuple(NAMES), 3)
    names = metrics_of(TrainConfig(metrics=[{"name": "per_class", "options": {}}]), info).names
    assert {"recall_cat", "precision_emu"} <= set(names)


def test_words_are_refused_where_training_was_on_numbers():
    """They were numbered anew at each call: two of three classes were other ones."""
    one, two = trainer(), VAL[1] > 0
    one.fit(X, Y, config(epochs=1))
    with pytest.raises(
        DataError, match=r"words, such as 'dog', .*no table of classes\. HINT: train with the"
    ):
        one.evaluate(VAL[0][two], NAMES[VAL[1][two]])
    for labels in (Y, np.eye(3)[Y]):
        with pytest.raises(DataError, match="words, such as 'cat', .*no table of classes"):
            trainer().prepare(X, labels, VAL[0], NAMES[VAL[1]], config=config())
