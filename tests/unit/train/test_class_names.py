"""The classes that words stand for: trained on, kept, and met again."""

import numpy as np
import pytest

import cyxjax as cx
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


def some(two):
    """(inputs, words) of the samples `two`, by a loader whose order only its sampler knows."""
    count = int(two.sum())
    return cx.DataLoader((VAL[0][two], NAMES[VAL[1][two]]), batch_size=4, sampler=list(range(count)))


def test_words_are_refused_where_training_was_on_numbers(tmp_path):
    """They were numbered anew at each call: two of three classes were other ones."""
    one, again, two = trainer(), trainer(), VAL[1] > 0
    with pytest.raises(DataError, match="words, such as 'dog', and nothing was trained: there is no table"):
        one.evaluate(VAL[0][two], NAMES[VAL[1][two]])
    one.fit(X, Y, config(epochs=1))
    one.save_checkpoint(str(tmp_path / "saved"))
    again.load_checkpoint(str(tmp_path / "saved"))
    for known in (one, again):
        for data in (
            (VAL[0][two], NAMES[VAL[1][two]]),
            (some(two),),
            (cx.data.Mixture([some(two).dataset], [1]),),
        ):
            with pytest.raises(
                DataError, match=r"words, such as 'dog', .*no table of classes\. HINT: train with the"
            ):
                known.evaluate(*data)
        with pytest.raises(DataError, match="words, such as 'cat', .*no table of classes"):
            known.prepare(X, NAMES[Y], config=config())
    for labels in (Y, np.eye(3)[Y]):
        with pytest.raises(DataError, match="words, such as 'cat', .*no table of classes"):
            trainer().prepare(X, labels, VAL[0], NAMES[VAL[1]], config=config())


def test_words_of_loaders_and_mixtures_count_in_the_table():
    """Each numbered its own: 'dog', the first of two, was taken for 'cat'."""
    two = VAL[1] > 0
    here = config(epochs=1, shuffle=False)
    expected = trainer().fit((X, Y), (VAL[0][two], VAL[1][two]), here).val_losses
    one = trainer()
    loader = cx.DataLoader((X, NAMES[Y]), batch_size=4, sampler=list(range(len(X))))
    assert one.fit(loader, some(two), here).val_losses == pytest.approx(expected)
    assert one.class_names == tuple(NAMES)
    exact = pytest.approx(one.evaluate(VAL[0][two], NAMES[VAL[1][two]]))
    assert one.evaluate(some(two)) == exact
    assert one.evaluate(cx.data.Mixture([some(two).dataset], [1])) == exact
    one.fit(some(two), here)  # its first step's batches too
    assert one.class_names == tuple(NAMES)
    odd = cx.DataLoader((X[:3], ["cat", "dog", "fox"]), sampler=[0, 1, 2])
    with pytest.raises(DataError, match="label 'fox' is none of the 3 classes trained on"):
        one.evaluate(odd)


def test_numbers_after_words_are_said_once_with_the_table(capsys):
    one = trainer()
    one.prepare(X, NAMES[Y], *VAL, config=config())
    said = capsys.readouterr().err
    assert (
        "validation data: labels that are numbers count in the classes trained on, which were words" in said
    )
    assert "0 is 'cat', 1 is 'dog', 2 is 'emu' (trainer.class_names)." in said
    one.evaluate(*VAL)
    one.evaluate(VAL[0], NAMES[VAL[1]])
    assert "WARNING" not in capsys.readouterr().err


def test_a_run_of_numbers_does_not_go_on_with_words(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path), "checkpoint_every_n_epochs": 1, "resume": "auto"}
    trainer().fit(X, Y, config(epochs=1, **kept))
    trainer().fit(X, NAMES[Y], config(epochs=1, **kept))  # the same numbers
    two = Y > 0
    with pytest.raises(DataError, match="checkpoint is of labels that were numbers; these data dog, emu"):
        trainer().fit(X[two], NAMES[Y[two]], config(**kept))
