"""Partial training: frozen parameters keep their bits under every strategy, the rest train as if alone."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.core.model.lora import LoraPlan, with_lora
from cyxjax.core.trees import named_leaves
from cyxjax.errors import ConfigError
from cyxjax.sync.registry import STRATEGIES
from cyxjax.weights.read import read_weights
from tests.support.models import Net, NnxNet, data
from tests.support.trainers import config, trainer, use_devices

DATA = data(24)


@pytest.fixture(autouse=True)
def three_replicas(group):
    use_devices(3)


def untrained(model=None, optimizer=None, callbacks=()):
    return trainer(
        model or Net(), optimizer=optimizer or cx.SGDOptimizer(0.1, momentum=0.9), callbacks=callbacks
    )


def fit(*parts, callbacks=(), **values):
    train = untrained(*parts, callbacks=callbacks)
    prepared = train.prepare(DATA, config=config(**{"epochs": 1, "batch_size": 2, "max_steps": 3} | values))
    before = jax.tree.map(np.array, train.params)
    train.fit_prepared(prepared)
    return train, dict(named_leaves(before)), dict(named_leaves(train.params))


def moved(before, after):
    return {name for name in before if (before[name] != after[name]).any()}


SIMILAR = {"bucketed", "bf16", "fp16", "int8", "local_sgd"}  # as mean or diloco except for the communication


EXACT = {"reproducibility": "exact", "batch_size": None, "global_batch_size": 8, "virtual_replicas": 4}
OTHERS = {"exact": EXACT | {"exact_threads": 8}, "average": {"callbacks": [cx.EMA(0.5)]}}


@pytest.mark.parametrize("comm", [*sorted(set(STRATEGIES) - SIMILAR), *OTHERS])
def test_what_is_frozen_keeps_its_bits(comm, tmp_path):
    options = OTHERS.get(comm) or {"comm": comm, "comm_options": dict(STRATEGIES[comm].usual or {})}
    train, before, after = fit(trainable="Dense_1/*", **options)
    assert moved(before, after) == {"Dense_1/kernel", "Dense_1/bias"}
    train.save_checkpoint(str(tmp_path))
    stored = read_weights(tmp_path).arrays
    for name in ("Dense_0/kernel", "Dense_0/bias"):
        np.testing.assert_array_equal(stored[f"params/{name}"].read(), before[name])
    # No state for frozen parameters:
    assert not [name for name, _ in named_leaves(train.state.sync) if "Dense_0" in name]


def test_the_rest_moves_as_if_it_were_alone():
    # Alone: the optimizer sees zeros for the rest, so its norm is that of the trained part.
    def alone(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "train" if path[0].key == "Dense_1" else "still", params
        )

    clipped = optax.chain(
        optax.multi_transform({"train": optax.identity(), "still": optax.set_to_zero()}, alone),
        optax.clip_by_global_norm(0.01),
        optax.sgd(0.1, momentum=0.9),
    )
    _, _, ours = fit(trainable="Dense_1/*", max_grad_norm=0.01)
    _, _, theirs = fit(None, clipped)
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"trainable": "head/*"}, r"trainable: 'head/\*'"),
        ({"lora": {"rank": 2, "pattern": "*/weight"}}, r"lora\.pattern \*/weight"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(options, named):
    with pytest.raises(ConfigError, match=f"{named} .*Dense_0/bias"):
        fit(**options)


@pytest.mark.parametrize("comm", ["mean", "fsdp"])
def test_adapters_alone_are_trained_and_saved_as_adapters(comm, tmp_path):
    train, before, after = fit(lora={"rank": 2, "alpha": 4}, comm=comm)
    assert moved(before, after) == {"Dense_0/kernel", "Dense_1/kernel"}  # merged: the base with its products
    train.save_checkpoint(str(tmp_path / "x"))
    again = untrained()
    again.load_checkpoint(str(tmp_path / "x"))
    for name, leaf in named_leaves(again.params):
        np.testing.assert_array_equal(leaf, after[name])
    if comm == "mean":
        with pytest.raises(ConfigError, match="kernel_lora_a.*`cyxjax.export"):
            fit(init_from={"path": str(tmp_path / "x"), "strict": False})
    first, last = again.params["Dense_0"], again.params["Dense_1"]
    hidden = np.maximum(DATA.inputs @ first["kernel"] + first["bias"], 0)
    np.testing.assert_allclose(again.predict(DATA.inputs), hidden @ last["kernel"] + last["bias"], atol=1e-6)


@pytest.mark.parametrize("make", [Net, lambda: NnxNet(nnx.Rngs(0))], ids=["linen", "nnx"])
def test_adapters_change_nothing_at_the_start(make):
    fns, plan = adapt(make()), LoraPlan(rank=2)
    params, state = with_lora(fns, plan).init(jax.random.key(0), DATA.inputs[:1])
    assert sum(name.endswith("kernel_lora_a") for name, _ in named_leaves(params)) == 2
    base, _ = fns.init(jax.random.key(0), DATA.inputs[:1])
    run = lambda f, p: f.apply(p, state, DATA.inputs, jax.random.key(1), False)[0]  # noqa: E731
    np.testing.assert_array_equal(run(with_lora(fns, plan), params), run(fns, base))


def test_an_nnx_model_is_given_the_merged_values_back():
    model = NnxNet(nnx.Rngs(0))
    train, before, after = fit(model, lora={"rank": 1, "pattern": "last/kernel"})
    assert moved(before, after) == {"last/kernel"}
    np.testing.assert_array_equal(model.last.kernel[...], after["last/kernel"])
    with pytest.raises(ConfigError, match="^lora .*init_from"):
        train.fit(DATA, config=config(batch_size=2))


def test_training_begins_where_a_file_says(tmp_path, capsys):
    kernel = np.full((5, 16), 0.25, np.float32)
    save_file({"Dense_0.weight": kernel.T.copy(), "Dense_0.bias": np.ones(16, np.float32)}, tmp_path / "w")
    for comm in ("mean", "fsdp"):
        first = {"path": str(tmp_path / "w"), "strict": False}
        _, before, after = fit(init_from=first, trainable="Dense_1/*", verbose=True, comm=comm)
        assert "init_from: 2 of 4 arrays of the model (safetensors)" in capsys.readouterr().out
        np.testing.assert_array_equal(before["Dense_0/kernel"], kernel)
        np.testing.assert_array_equal(after["Dense_0/kernel"], kernel)
        assert (before["Dense_1/kernel"] != 0).any()
    with pytest.raises(ConfigError, match="2 .*4 .*: Dense_1/bias, Dense_1/kernel"):
        fit(init_from=str(tmp_path / "w"))


def test_a_resumed_run_asks_the_file_no_more(tmp_path):
    path = tmp_path / "w"
    save_file({"Dense_1.bias": np.ones(3, np.float32)}, path)
    keep = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every_n_steps": 1, "resume": "auto"}
    first = {"init_from": {"path": str(path), "strict": False}, "trainable": "Dense_1/*", **keep}
    _, _, end = fit(**first)
    path.unlink()
    train, _, after = fit(**first | {"max_steps": 4})
    assert train.run_state.position.step == 4
    assert (after["Dense_1/bias"] != end["Dense_1/bias"]).any()
    np.testing.assert_allclose(after["Dense_1/bias"], end["Dense_1/bias"], atol=0.1)
