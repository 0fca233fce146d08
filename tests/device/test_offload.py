"""The optimizer state is in host memory between steps, during the whole run, with the same bits."""

import jax
import numpy as np
import pytest

import cyxjax as cx
from cyxjax.core.mesh import HOST_MEMORY
from cyxjax.observe.compiled_plan import plan_lines, state_bytes
from cyxjax.train.hooks.hook import Position
from cyxjax.train.start.memory_plan import held_by
from tests.support.sharded import MODELS, trained
from tests.support.trainers import X, Y, assert_near, config, mlp, use_devices

pytestmark = pytest.mark.usefixtures("as_users_promote")


def kinds(state):
    """Memory kinds of the leaves with more than one number per replica, and of the others."""
    leaves = jax.tree.leaves(state)
    large = {leaf.sharding.memory_kind for leaf in leaves if leaf.addressable_shards[0].data.size > 1}
    return large, {leaf.sharding.memory_kind for leaf in leaves if leaf.ndim == 0}


ROWS = {
    "zero1": {"max_grad_norm": 0.1, "sentinel_every_n_steps": 1},
    "fsdp": {"gradient_accumulation_steps": 2, "callbacks": lambda: [cx.EMA(0.9)]},
    "float16": {"precision": "float16", "sentinel_every_n_steps": 1},
}


@pytest.mark.parametrize(
    "row", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "float16"))]
)
def test_the_same_bits_from_the_host_s_memory_also_when_resumed(row, tmp_path):
    comm, found, settings = {"float16": "fsdp"}.get(row, row), [], dict(ROWS[row])
    make = settings.pop("callbacks", list)
    for offload, epochs in (("none", 2), ("optimizer", 1), ("optimizer", 2)):
        folder, both = tmp_path / offload, settings | {"offload": offload}
        one = trained(comm, "perceptron", 2, folder, epochs, callbacks=make(), **both)
        found.append(one)
        assert kinds(one.state.sync) == ({HOST_MEMORY if offload == "optimizer" else "device"}, {"device"})
    found = found[0], found[-1]
    jax.tree.map(np.testing.assert_array_equal, *((one.values, one.state.sync) for one in found))
    inputs = MODELS["perceptron"][1][0]
    np.testing.assert_array_equal(*(one.predict(inputs) for one in found))


def test_what_waits_on_the_host_is_planned_compiled_and_healed_there():
    use_devices(2)
    optimizer = cx.SGDOptimizer(0.1, momentum=0.9)
    trainer = cx.distributed.DistributedTrainer(mlp(), cx.CrossEntropyLoss(), optimizer)
    prepared = trainer.prepare(X, Y, config=config(comm="mean", offload="optimizer"))
    held = state_bytes(trainer.state)
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.params))
    assert (held["params"], held["host"]) == (params, params)  # one momentum per parameter
    assert held["sync"] < 16
    lines = plan_lines([], held, {"temporaries": 0})
    assert lines[-1].startswith("waiting in the host's memory")
    batch = next(iter(prepared.feed.train(Position(), lambda: (False, False), 1))).batch
    text = trainer.program.train_step.lower(trainer.state, batch).compile().as_text().split("\n")[0]
    assert text.count("S(5)") == 2 * len(jax.tree.leaves(trainer.params))  # XLA's host memory space: in, out
    counted = next(held_by(prepared, jax.devices()[:2], batch))
    assert counted.state_bytes(2) == sum(held.values()) - held["host"]
    sentinel, state = trainer.program.sentinel, trainer.state
    prints = np.asarray(sentinel.fingerprints(state))
    healed = sentinel.heal(state, np.zeros(prints.shape[1], np.int32))
    assert kinds(healed.sync) == ({HOST_MEMORY}, {"device"})
    np.testing.assert_array_equal(np.asarray(sentinel.fingerprints(healed)), prints)


def test_a_restored_state_waits_on_the_host_again(tmp_path):
    def made():
        return cx.distributed.DistributedTrainer(mlp(), cx.CrossEntropyLoss(), cx.MomentumOptimizer(0.1))

    use_devices(2)
    one, other, moved = made(), made(), made()
    one.fit(X, Y, config(comm="mean", offload="optimizer", epochs=1))
    one.save_checkpoint(str(tmp_path / "saved"))
    other.load_checkpoint(str(tmp_path / "saved"))
    assert kinds(other.state.sync)[0] == {HOST_MEMORY}
    moved.load_checkpoint(str(tmp_path / "saved"))
    moved.fit(X, Y, config(comm="zero1", offload="optimizer", epochs=2))
    assert kinds(moved.state.sync)[0] == {HOST_MEMORY}
    np.testing.assert_array_equal(other.predict(X), one.predict(X))
    other.fit(X, Y, config(comm="mean", epochs=2))  # continues from the loaded state, on the devices
    assert kinds(other.state.sync)[0] == {"device"}
    again = config(comm="zero1", epochs=2, checkpoint_dir=str(tmp_path / "saved"), resume="auto")
    third = made()
    third.fit(X, Y, again)
    for ended in (other, moved):
        assert_near(ended.params, third.params, 1e-4, 1e-5)
