"""A bit flip on one replica is detected, named, and healed if most replicas still agree."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cyxjax.config.experiment import TrainConfig
from cyxjax.core.losses import CrossEntropyLoss
from cyxjax.core.mesh import build_mesh
from cyxjax.core.sentinel import build_sentinel, differences, replicated_names
from cyxjax.errors import DesyncError, NonFiniteError
from cyxjax.train.hooks.bad_steps import TerminateOnNaN
from cyxjax.train.hooks.hook import Position, RunState
from cyxjax.train.trainer import DistributedTrainer
from tests.support.flips import flip
from tests.support.trainers import classes, does, use_devices


def replicated(mesh, value):
    return jax.device_put(value, NamedSharding(mesh, P()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "complex64"])
def test_every_bit_of_every_dtype_shows_and_heals(dtype):
    mesh = build_mesh(jax.devices()[:4])
    value = jnp.arange(6).astype(dtype).reshape(2, 3)
    _, fingerprints, heal = build_sentinel(mesh, P())
    tree = {"a": value, "b": jnp.array([True, False]), "key": jax.random.key(5)}
    tree = {name: replicated(mesh, leaf) for name, leaf in tree.items()}
    assert differences(np.asarray(fingerprints(tree)), replicated_names(tree, P())) == []
    for bit in range(value.dtype.itemsize * 8):
        broken = tree | {"a": flip(tree["a"], replica=2, bit=bit, element=5)}
        (found,) = differences(np.asarray(fingerprints(broken)), replicated_names(tree, P()))
        assert found == ("a", (2,), 0)
        twice = tree | {"a": flip(broken["a"], replica=2, bit=bit, element=3)}
        (found,) = differences(np.asarray(fingerprints(twice)), replicated_names(tree, P()))
        assert found == ("a", (2,), 0)
    healed = heal(broken, np.array([0, 3, 1], np.int32))
    assert differences(np.asarray(fingerprints(healed)), replicated_names(tree, P())) == []
    for one in (healed, tree):
        one["key"] = jax.random.key_data(one["key"])
    for name in tree:
        assert np.asarray(healed[name]).tobytes() == np.asarray(tree[name]).tobytes()


def test_the_order_of_elements_shows_and_values_per_replica_are_left_alone():
    mesh, bits = build_mesh(jax.devices()[:2]), np.arange(7, 4000, 13, np.uint32) * np.uint32(0x9E3779B1)
    tree = {"same": flip(replicated(mesh, bits), 1, 30, 0), "own": jnp.float32([[1], [2]])}
    spec = {"same": P(), "own": P("data")}
    assert replicated_names(tree, spec) == ["same"]
    _, fingerprints, _ = build_sentinel(mesh, spec)
    prints = np.asarray(fingerprints(tree))
    assert differences(prints, ["same"]) == [("same", (1,), None)]  # two replicas: no majority
    turned = np.asarray(fingerprints(tree | {"same": replicated(mesh, bits[::-1].copy())}))
    assert turned[0, 0, 0] == prints[0, 0, 0] == bits.sum(dtype=np.uint32)
    assert turned[0, 0, 1] != prints[0, 0, 1]


def test_a_difference_and_a_nan_show_in_any_of_many_leaves():
    mesh = build_mesh(jax.devices()[:2])
    leaves = [replicated(mesh, np.full(3, i, np.float32)) for i in range(130)]
    differ = [*leaves[:100], flip(leaves[100], 1, 3, 0), *leaves[101:]]
    prints = build_sentinel(mesh, P()).fingerprints(differ)
    assert differences(prints, replicated_names(differ, P())) == [("100", (1,), None)]
    for bad in (5, 129):
        params = [*leaves[:bad], leaves[bad] * np.float32(np.inf), *leaves[bad + 1 :]]
        with pytest.raises(NonFiniteError, match="step 0"):
            TerminateOnNaN().on_state(RunState(Position(), SimpleNamespace(params=params), None))


def flip_after(step):
    """A callback that flips a mantissa bit of the kernel on replica 2 after `step`."""

    def flipped(self, moment):
        params = dict(moment.state.params)
        params["kernel"] = flip(params["kernel"], replica=2, bit=3)
        return moment.state._replace(params=params)

    return does(wants_state=lambda self, position, saving: position.step == step, on_state=flipped)


def fit(folder, flipper, **changes):
    use_devices(4)
    trainer = DistributedTrainer(linen.Dense(3), CrossEntropyLoss(), optax.sgd(0.1), callbacks=flipper)
    options = {"epochs": 3, "batch_size": 2, "run_dir": str(folder), "sentinel_every_n_steps": 4}
    trainer.fit(*classes(64), TrainConfig(checkpoint_every_n_steps=3, **options | changes))
    return trainer


def test_training_stops_within_the_interval_and_names_leaf_and_rank(tmp_path):
    with pytest.raises(DesyncError, match="step 12 ") as caught:
        fit(tmp_path, [flip_after(10)])
    assert "params/kernel on rank 0 (replica 2) is not what most others hold" in str(caught.value)
    # Step 12 was not saved: a checkpoint has only what all replicas agree on.
    assert sorted(p.name[-2:] for p in (tmp_path / "checkpoints").glob("step_*")) == ["03", "06", "09"]


def test_healed_training_ends_as_if_nothing_had_happened(tmp_path, capsys):
    whole = fit(tmp_path / "whole", [])
    healed = fit(tmp_path / "healed", [flip_after(8)], on_desync="heal")
    assert "All replicas were set to the value of the majority." in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, whole.params, healed.params)


def test_a_warning_is_given_once(tmp_path, capsys):
    fit(tmp_path, [flip_after(8)], on_desync="warn")
    assert capsys.readouterr().out.count("WARNING: Gradients differ across ranks: after step 8") == 1


def test_off_means_off(tmp_path):
    assert fit(tmp_path, [flip_after(8)], sentinel_every_n_steps=0).history.num_steps == 24
