"""Loaders and metrics as other libraries' users write them: right, or refused by name."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cyxjax as cx
from cyxjax.data.streams import as_rows
from cyxjax.distributed import process_group
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.feeding import fit_data
from cyxjax.train.plan import plan_of_checkpoint

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = np.arange(24) % 3


class Loader:
    """A torch-like loader: it begins anew each time it is iterated."""

    def __init__(self, x=X, y=Y, rows=8):
        self.parts = [(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)]

    def __iter__(self):
        return iter(self.parts)


class Once(Loader):
    """An iterator that is made once: later epochs, and what was looked at before, are lost."""

    def __iter__(self):
        self.left = getattr(self, "left", None) or iter(self.parts)
        return self.left


class Persistent(Loader):
    """As torch's with persistent_workers: one iterator object, which begins anew each time."""

    persistent_workers, kept = True, None

    def __iter__(self):
        self.kept = self.kept or Restarting()
        self.kept.left = iter(self.parts)
        return self.kept


class Restarting:
    def __iter__(self):
        return self

    def __next__(self):
        return next(self.left)


class Filling(Loader):
    """One pair of arrays, filled again for each batch."""

    def __iter__(self):
        x, y = np.empty_like(self.parts[0][0]), np.empty_like(self.parts[0][1])
        for x[:], y[:] in self.parts:
            yield x, y


def fit(*data, loss=None, metrics=None, **config):
    model = cx.SequentialModel([cx.LinearModule(4, 3)])
    trainer = cx.distributed.DistributedTrainer(
        model, loss or cx.CrossEntropyLoss(), optax.sgd(0.1), metrics=metrics
    )
    options = {"epochs": 1, "batch_size": 8, "verbose": False, "checkpoint_every_n_epochs": 0, "seed": 1}
    trainer.fit(*data, cx.distributed.DistributedTrainingConfig(**options | config))
    return trainer


def bits(trainer):
    return [leaf.tobytes() for leaf in jax.tree.leaves(trainer.params)]


@pytest.mark.parametrize("label", [-1, 3])
@pytest.mark.parametrize("place", ["training", "validation"])
def test_a_label_of_a_loader_that_names_no_class_is_refused_by_its_batch(label, place):
    odd = Y.copy()
    odd[17] = label
    data = (Loader(y=odd),) if place == "training" else (Loader(), Loader(y=odd))
    with pytest.raises(DataError, match=f"{place} .*batch 2.*sample 1 .*label {label}"):
        fit(*data)


def test_a_loader_that_can_be_read_once_is_refused_and_persistent_workers_are_not():
    with pytest.raises(DataError, match="Once .*steps_per_epoch"):
        fit(Once())  # it trained on what the look at the first batch had left, and gave NaN for epoch 1
    assert bits(fit(Persistent(), epochs=2)) == bits(fit(Loader(), epochs=2))


@pytest.mark.parametrize(("steps", "said"), [(None, "epoch 1"), (2, "steps_per_epoch")])
def test_a_loader_that_runs_dry_is_an_error(steps, said):
    class Dry(Loader):
        asked = 0

        def __iter__(self):
            self.asked += 1
            return iter(self.parts if self.asked < 5 else [])

    with pytest.raises(DataError, match=said):
        fit(Dry(), epochs=9, steps_per_epoch=steps)


def test_arrays_that_are_filled_again_are_read_in_time():
    assert bits(fit(Filling(), gradient_accumulation_steps=3)) == bits(
        fit(Loader(), gradient_accumulation_steps=3)
    )

    class Items:
        kept = np.empty(4, np.float32)

        def __len__(self):
            return len(X)

        def __getitem__(self, i):
            self.kept[:] = X[i]
            return self.kept, Y[i]

    assert bits(fit(Items())) == bits(fit(X, Y))


@pytest.mark.parametrize(
    "metric",
    [lambda o, t: o[:, 0] / o[:, 0].max(), lambda o, t: (o[:, 0].sum(), jnp.float32(8)), lambda o, t: o.T],
    ids=["coupled", "a pair of numbers", "a value per class"],
)
def test_a_metric_that_is_no_mean_over_samples_is_refused(metric):
    with pytest.raises((ConfigError, DataError), match="mine"):
        fit(X, Y, metrics=cx.Metrics({"mine": metric}))


def test_metrics_of_one_number_of_samples_and_pairs_are_taken():
    mine = {
        "mean": lambda o, t: (o.argmax(-1) == t).mean(),
        "hit": lambda o, t: (o.argmax(-1) == t).astype(jnp.float32),
        "ones": lambda o, t: (o[:, 0], (t == 1).astype(jnp.float32)),
    }
    trainer = fit(X[:21], Y[:21], X[:21], Y[:21], metrics=cx.Metrics(mine))
    outputs = trainer.predict(X[:21])
    found = trainer.history.metrics
    assert found["val_mean"] == pytest.approx(found["val_hit"], rel=1e-6)
    assert found["val_hit"] == pytest.approx([(outputs.argmax(-1) == Y[:21]).mean()], rel=1e-6)
    assert found["val_ones"] == pytest.approx([outputs[Y[:21] == 1, 0].mean()], rel=1e-5)


def test_a_rate_that_follows_the_batch_wants_a_loader_that_tells_it():
    scaled = {"lr_scaling": "linear", "base_batch_size": 4}
    with pytest.raises(ConfigError, match="Loader .*batch_size.* global_batch_size"):
        fit_data.parse((Loader(),), cx.distributed.DistributedTrainingConfig(**scaled), 1, 1)
    told = cx.distributed.DistributedTrainingConfig(**scaled, global_batch_size=8)
    assert fit_data.parse((Loader(),), told, 1, 1)[1].global_batch_size == 8


def test_a_loader_is_read_once_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = []

    class Counting(Loader):
        def __iter__(self):
            for number, part in enumerate(self.parts):
                read.append(number)
                yield part

    trainer = cx.distributed.DistributedTrainer(
        cx.get_model("mlp")(num_classes=3),
        lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out, y),
        optax.sgd(0.1),
    )
    trainer.fit(Counting(), cx.distributed.DistributedTrainingConfig(epochs=1))
    assert read.count(0) == 2  # shapes from one batch, then the epoch
    assert read[-3:] == [0, 1, 2]


def test_the_batch_of_a_loader_that_does_not_tell_it_is_not_made_up(capsys):
    trainer = fit(Loader(rows=6), epochs=1, verbose=True, batch_size=64)  # "64 samples ... = 64 per step"
    (plan,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Batch plan")]
    assert "as many samples as the loader's batches have" in plan
    assert "first step of this process 6 samples" in plan
    assert "64" not in plan
    assert trainer.history.effective_batch_size == 6


def test_a_stored_batch_that_the_replicas_cannot_share_does_not_keep_a_model_from_being_loaded():
    trainer = cx.DistributedTrainer(
        cx.SequentialModel([cx.LinearModule(4, 3)]), cx.CrossEntropyLoss(), optax.sgd(0.1)
    )
    stored = {"gradient_accumulation_steps": 2, "global_batch_size": 32}
    assert planned_batch(trainer, stored) == (2, 8, 2)
    assert planned_batch(trainer, stored | {"global_batch_size": 40}) == (3, 8, 2)  # 16 parts: 3 samples each


def planned_batch(trainer, config):
    meta = {"config": config, "inputs": {"": [[4], "float32"]}}
    plan = plan_of_checkpoint(trainer.recipe, process_group.ensure(), meta, remat="none")
    assert plan.inputs.shape == (1, 4)
    return plan.settings.step.batch


def test_grains_workers_find_their_flags(monkeypatch):
    marked = []
    flags = SimpleNamespace(is_parsed=lambda: bool(marked), mark_as_parsed=lambda: marked.append(1))
    monkeypatch.setitem(sys.modules, "absl.flags", SimpleNamespace(FLAGS=flags))
    monkeypatch.delitem(sys.modules, "grain", raising=False)
    as_rows(Loader())
    assert not marked  # whose program it is without grain
    monkeypatch.setitem(sys.modules, "grain", SimpleNamespace())
    as_rows(Loader())
    as_rows(Loader())
    assert marked == [1]
