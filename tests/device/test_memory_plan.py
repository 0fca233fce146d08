"""The memory plan for other numbers of replicas: counted where possible, extrapolated otherwise."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.cli import main
from cyxjax.observe.compiled_plan import state_bytes
from cyxjax.train.hooks.hook import Position
from cyxjax.train.start.memory_plan import STRATEGIES, Held, held_by, table
from cyxjax.train.trainer import DistributedTrainer
from tests.support.trainers import X, Y, config, use_devices


def test_state_is_counted_and_temporaries_are_a_constant_and_a_share():
    # 10 numbers of 4 bytes sharded, 3 of 2 bytes whole; 100 + 60 / replicas bytes of temporaries
    held = Held("fsdp", ((10, 4, True), (3, 2, False)), ((2, 130), (4, 115)))
    assert [held.state_bytes(n) for n in (1, 4, 4096)] == [46, 3 * 4 + 6, 4 + 6]
    assert [held.temporary_bytes(n) for n in (2, 4, 6, 4096)] == [130, 115, 110, 100]


def test_the_first_that_fits_is_named_and_none_where_none_does():
    rows = [
        Held("mean", ((1000, 1, False),), ((2, 0), (4, 0))),
        Held("fsdp", ((1000, 1, True),), ((2, 0), (4, 0))),
    ]
    fitting = {line.split()[0]: line.partition("-> ")[2] for line in table(rows, 300.0)[3:]}
    assert (fitting["1"], fitting["4"], fitting["4096"]) == ("none fits", "fsdp", "fsdp")
    assert "-> mean" in table(rows, 1000.0)[3]
    assert all("->" not in line for line in table(rows, None)[1:])


def test_what_is_counted_is_what_the_devices_hold():
    use_devices(4)
    trainer = DistributedTrainer(linen.Dense(3), cx.CrossEntropyLoss(), cx.SGDOptimizer(0.1, momentum=0.9))
    prepared = trainer.prepare(X, Y, config=config())
    batch = next(iter(prepared.feed.train(Position(), lambda: (False, False), 1))).batch
    with jax.numpy_dtype_promotion("standard"):  # as users run it
        found = {one.comm: one for one in held_by(prepared, jax.devices()[:4], batch)}
    assert set(found) == set(STRATEGIES)
    for comm, one in found.items():
        trainer.prepare(X, Y, config=config(comm=comm))
        assert one.state_bytes(4) == sum(state_bytes(trainer.state).values())
        assert one.compiled[1][0] == 4
        assert np.isfinite(one.whole_bytes(4096))


@pytest.mark.slow
def test_the_command_names_the_cheapest_that_fits_at_each_number_of_replicas(capsys, cwd):
    config = Path(__file__).parents[2] / "configs" / "digits.yaml"
    words = ["--data.name", "digits", "--model.name", "mlp", "--cpu-devices", "8", "--device-gb", "0.00025"]
    named = {}
    for offload in ("none", "optimizer"):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users run it
            assert main.main(["plan", "--config", str(config), *words, "--offload", offload]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if " -> " in line]
        named[offload] = {int(row[0]): " ".join(row[row.index("->") + 1 :]) for row in rows}
    # 77 kB of parameters, 154 of moments: 385 kB whole with gradients etc., 208 with sharded moments
    assert sorted(named["none"]) == [1, 4, 16, 64, 256, 1024, 4096]
    assert [named["none"][count] for count in (1, 64, 4096)] == ["none fits", "zero1", "zero1"]
    assert set(named["optimizer"].values()) == {"mean"}
    assert not list(cwd.iterdir())
