"""Metrics that need all samples: for any number of replicas as on one device with all data."""

import json

import numpy as np
import pytest

import cyxjax as cx
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.observe.history import DistributedTrainingHistory
from tests.support import sklearn_metrics as sk
from tests.support.trainers import CLASSES, VAL, X, Y, config, trainer, use_devices


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (4, {"gradient_accumulation_steps": 2}),
        pytest.param(4, {"comm": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(
            2,
            {"reproducibility": "exact", "virtual_replicas": 4, "exact_threads": 8},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["4 by 2", "4 fsdp", "2 exact"],
)
def test_replicas_equal_scikit_learn_on_all_samples(replicas, options, tmp_path):
    use_devices(replicas)
    measured = {"f1": cx.F1(CLASSES), "auc": cx.AUC(20_000, positive=2), "table": cx.ConfusionMatrix(CLASSES)}
    train = trainer(metrics=cx.Metrics(measured))
    # 19 samples in steps of 8: the last has 3, so that some replicas and micro-batches have only padding.
    cfg = config(
        **({"epochs": 2, "batch_size": None, "global_batch_size": 8, "monitor": "val_f1"} | options),
        checkpoint_every_n_epochs=1,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        log_every_n_batches=1,
    )
    x, y = (part[:19] for part in VAL)
    history = train.fit(
        X[:19], Y[:19], x, y, config=cfg, run_dir=str(tmp_path), sinks=["jsonl"], report=False
    )
    logits = np.asarray(train.predict(x))
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = train.evaluate_metrics(x, y)
    assert found["f1"] == pytest.approx(sk.f1_score(y, logits.argmax(-1), average="macro"), rel=1e-6)
    # pairs in one bin count half
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y == 2, probability[:, 2]), abs=1e-3)
    np.testing.assert_array_equal(
        found["table"], sk.confusion_matrix(y, logits.argmax(-1), labels=range(CLASSES))
    )

    # The same in history, records and the monitored value.
    assert history.metrics["val_f1"][-1] == found["f1"]
    assert history.metrics["val_table"][-1] == found["table"].tolist()
    assert np.sum(history.metrics["train_table"][0]) == 19
    history.save(tmp_path / "history.json")
    assert DistributedTrainingHistory.load(tmp_path / "history.json").metrics == history.metrics
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["val_f1"] for r in records if "val_f1" in r] == history.metrics["val_f1"]
    assert not any("table" in key for record in records for key in record)
    assert read_manifest(step_folder(tmp_path / "checkpoints", 3)).metric == history.metrics["val_f1"][0]
