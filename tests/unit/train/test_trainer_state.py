"""The state of a trainer: checkpoints that continue bit for bit, second fits, and exact epochs of loaders."""

import os

import jax
import numpy as np
import pytest
from flax import linen, nnx

import cyxjax as cx
from cyxjax.checkpoint.folders import list_steps
from cyxjax.distributed.sampler import DistributedSampler, create_dataloaders_distributed
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.train import run_state
from cyxjax.train.feeding import fit_data
from cyxjax.train.feeding.fit_data import parse
from tests.support.flax_examples import GraphsTuple
from tests.support.refusals import refused
from tests.support.trainers import (
    CLASSES,
    VAL,
    Line,
    X,
    Y,
    after_fit,
    batches,
    config,
    loaded,
    mlp,
    same_bits,
    trainer,
)

pytestmark = pytest.mark.usefixtures("two_devices")


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    path, epochs = str(tmp_path / "model.ckpt"), 4
    one = after_fit(X, Y, *VAL, config(max_steps=11))  # in the middle of the second epoch of 8 steps
    one.save_checkpoint(path)
    before = one.evaluate(*VAL)
    other = loaded(path)
    assert other.evaluate(*VAL) == before
    assert one.history.stopped_by == "max_steps"
    assert other.history.to_dict() == one.history.to_dict() | {"stopped_by": ""}  # it may go on
    history = other.fit(X, Y, *VAL, config(epochs=epochs))
    whole = after_fit(X, Y, *VAL, config(epochs=epochs))
    assert history.train_losses == whole.history.train_losses
    assert same_bits(other.state, whole.state)


class Two(linen.Module):
    @linen.compact
    def __call__(self, a, b):
        return linen.Dense(CLASSES)(a) + linen.Dense(CLASSES)(b)


class OfGraphs(linen.Module):
    @linen.compact
    def __call__(self, graphs):
        assert graphs.globals is None
        return linen.Dense(3)(graphs.nodes) + linen.Dense(3)(graphs.n_node)


@pytest.mark.parametrize(
    ("model", "inputs"), [(OfGraphs(), GraphsTuple(X[:, :4], None, X[:, 4:])), (Two(), (X[:, :4], X[:, 4:]))]
)
def test_a_model_of_several_inputs_is_loaded_before_it_has_seen_data(tmp_path, model, inputs):
    once, twice = (config(epochs=epochs, steps_per_dispatch=1) for epochs in (1, 2))
    one = after_fit(inputs, Y, once, model=model)
    one.save_checkpoint(str(tmp_path / "model"))
    other = loaded(tmp_path / "model", model=model)
    assert other.evaluate(inputs, Y) == one.evaluate(inputs, Y)
    assert np.array_equal(other.predict(inputs), one.predict(inputs))
    other.fit(inputs, Y, twice)
    assert same_bits(other.state, after_fit(inputs, Y, twice, model=model).state)


def test_a_checkpoint_that_is_not_there_not_ours_or_not_writable_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        trainer().load_checkpoint(str(tmp_path / "nothing"))
    one = after_fit(X, Y, config(epochs=1))
    one.save_checkpoint(str(tmp_path / "a"))
    with pytest.raises(CheckpointError):
        trainer(Line(), cx.MSELoss()).load_checkpoint(str(tmp_path / "a"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises((CheckpointError, OSError)):
        one.save_checkpoint(os.path.join(tmp_path, "file", "a"))


def test_a_second_fit_goes_on_from_the_parameters_where_they_lie_and_compiles_nothing(monkeypatch):
    one, compiled, fetched = trainer(), [], []
    first = one.fit(X, Y, *VAL, config())
    between, program, take = one.params, one.program, run_state.local_value
    monkeypatch.setattr(run_state, "local_value", lambda leaf: fetched.append(leaf.shape) or take(leaf))
    jax.monitoring.register_event_duration_secs_listener(lambda *args, **more: compiled.append((*args, more)))
    try:
        second = one.fit(X, Y, *VAL, config(epochs=1, log_every_n_batches=3))
    finally:
        jax.monitoring.clear_event_listeners()
    assert one.program is program
    # Shapes are traced again to check the data; nothing is compiled.
    assert [more["fun_name"] for name, _, more in compiled if "backend_compile" in name] == []
    assert fetched == [()]  # the step's number; 0.4 s of a GPU's time where a GPT-2 went to the host and back
    assert (len(first.train_losses), len(second.train_losses)) == (2, 1)
    assert second.train_losses[0] < first.train_losses[1]
    assert second.num_steps == 3 * 8  # step numbers continue, so that keys and checkpoints differ
    assert not same_bits(between, one.params)
    one.prepare(X, Y, config=config(max_grad_norm=1.0))
    assert one.program is not program


def test_a_model_of_layers_holds_the_trained_values_after_fit_and_load(tmp_path):
    model = mlp()
    one = after_fit(X, Y, config(epochs=1), model=model)
    assert same_bits(model.parameters(), one.params)
    one.save_checkpoint(str(tmp_path / "c"))
    other = mlp()
    trainer(other).load_checkpoint(str(tmp_path / "c"))
    assert same_bits(other.parameters(), model.parameters())
    # A new trainer starts from the model's values, also if a layer was added.
    assert trainer(model).fit(X, Y, config(epochs=1)).train_losses[0] < one.history.train_losses[0]
    kernel = model.parameters()["0_linear"]["kernel"]
    model.add(cx.ReLUModule())
    np.testing.assert_array_equal(model.parameters()["0_linear"]["kernel"], kernel)
    assert np.all(trainer(model).predict(X) >= 0)


@pytest.mark.parametrize("kind", ["sequential", "nnx"])
def test_values_set_in_a_model_after_its_fit_are_refused_by_the_trainer(kind):
    model = mlp() if kind == "sequential" else nnx.Linear(X.shape[1], 3, rngs=nnx.Rngs(0))
    one = after_fit(X, Y, config(epochs=1), model=model)
    one.predict(X)
    if kind == "sequential":
        model.set_values(jax.tree.map(np.zeros_like, model.parameters()), {})
    else:
        model.kernel[...] = model.kernel[...] * 0
    for use in (lambda: one.predict(X), lambda: one.evaluate(*VAL), lambda: one.fit(X, Y, config())):
        with refused("0_linear/bias" if kind == "sequential" else "kernel"):
            use()


@pytest.mark.parametrize("name", ["callbacks", "optimizer", "metrics", "augment", "model", "loss_fn"])
def test_a_trainers_parts_are_not_set(name):
    with pytest.raises(AttributeError, match=name):
        setattr(trainer(), name, None)


def test_samplers_of_ours_are_read_exactly_and_padding_is_not_counted():
    # 60 samples on 7 ranks: the sampler would repeat 3. Reading its dataset uses each sample once.
    loader = cx.data.DataLoader((X[:61], Y[:61]), 8, DistributedSampler(60, seed=3, shuffle=False))
    data, found = parse((loader, VAL), config(batch_size=64), local_replicas=2, num_replicas=2)
    assert data.indexed
    assert data.order == (3, False)
    assert (found.batch_size, len(data.train), len(data.val)) == (4, 60, 15)


class Backwards(DistributedSampler):
    def __iter__(self):
        return reversed([*super().__iter__()])


@pytest.mark.parametrize(
    "loader",
    [
        cx.data.DataLoader((X, Y), 8, Backwards(60)),
        cx.data.DataLoader((X, Y), 8, DistributedSampler(60, num_replicas=2, rank=1)),  # another rank's share
        cx.data.DataLoader((X, Y), 8, range(0, 60, 2)),  # a sampler of the user's
        cx.data.DataLoader((X, Y), 9),  # nine samples cannot be split evenly over two replicas
    ],
)
def test_other_loaders_are_asked_for_their_batches(loader):
    assert not parse((loader,), config(), local_replicas=2, num_replicas=2)[0].indexed
    assert trainer(linen.Dense(3)).fit(loader, config(epochs=1)).num_steps == len(loader)
    with pytest.raises(ConfigError, match="validation_split"):  # no samples can be held out of batches
        parse((loader,), config(validation_split=0.25), local_replicas=2, num_replicas=2)


def test_distributed_loaders_evaluate_every_sample_once():
    found = create_dataloaders_distributed((X, Y), VAL, VAL, batch_size=8)
    assert fit_data.whole_dataset(found.val) is not None
    one = trainer(linen.Dense(3))
    history = one.fit(found.train, found.val, config(epochs=1))
    assert history.val_losses[0] == pytest.approx(one.evaluate(*VAL)[0], rel=1e-6)
    assert one.evaluate(found.test) == pytest.approx(one.evaluate(*VAL), rel=1e-6)
    for other in (batches(*VAL, 8), cx.data.DataLoader(VAL, 8, sampler=np.arange(len(VAL[0])))):
        assert one.evaluate(other) == pytest.approx(one.evaluate(*VAL), rel=1e-6)


def test_a_loader_s_batch_size_and_another_global_one_are_refused():
    wanted = config(batch_size=None, global_batch_size=32)
    with pytest.raises(ConfigError, match="global_batch_size=32.*batch_size=8"):
        trainer().fit(cx.data.DataLoader((X, Y), 8), wanted)


def test_checkpoints_of_another_run_stay_where_a_loaded_state_is_trained_on(tmp_path):
    each = {"checkpoint_every_n_epochs": 1, "keep_last": 1, "keep_best": 0}
    saved, other = tmp_path / "saved", tmp_path / "other"
    after_fit(X, Y, config(epochs=4, checkpoint_dir=str(other), **each | {"keep_last": 9}))  # 8 steps each
    after_fit(X, Y, config()).save_checkpoint(str(saved))
    # All epochs of the first are done; the last continues in its own folder.
    for source, epochs, kept in ((saved, 2, [8, 16, 24, 32]), (saved, 6, [48]), (other, 8, [64])):
        loaded(source).fit(X, Y, config(epochs=epochs, checkpoint_dir=str(other), **each))
        assert list_steps(other) == kept
        aside = {path.name.partition(".")[0] for path in other.iterdir() if ".earlier-" in path.name}
        assert aside == {f"step_{step:08}" for step in (8, 16, 24, 32) if step not in kept}
