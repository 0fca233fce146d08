"""The communication of a step, from the compiled program: no strategy may send more than it states."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cyxjax.cli import main as cli
from cyxjax.core.evaluation import EvalState, build_consensus, build_eval_step
from cyxjax.core.losses import CrossEntropyLoss, as_per_example
from cyxjax.core.mesh import PER_REPLICA, build_mesh, put_rows
from cyxjax.observe.compiled_plan import Collective, collectives
from cyxjax.sync.mean import buckets
from tests.support.models import Net, batches_of, data, stepping
from tests.support.places import ROOT
from tests.support.strategies import USUAL, Alone, built, random_grads

REPLICAS = 4
SIZE = 5 * 16 + 16 + 16 * 3 + 3  # parameters of Net: 147
SMALL = 3 * 2 * 4  # loss, accuracy and signals: what every step sums over replicas, in bytes


def sent_in(comm, *, accumulation=1, evaluate=False, replicas=REPLICAS, **options):
    """The collectives of a step, or of an evaluation. options: of `stepping`."""
    one = stepping(Net(), data(64), replicas=replicas, comm=comm, accumulation=accumulation, **options)
    batch = next(batches_of(data(64), one.mesh, 2, accumulation=accumulation))
    program, state = one.step, one.state
    if evaluate:
        program = build_eval_step(one.fns, as_per_example(CrossEntropyLoss()), one.mesh)
        state = EvalState.of(build_consensus(one.sync, one.mesh)(state))
    return collectives(program.lower(state, batch).compile().as_text())


def sent(name, max_grad_norm=None, accumulation=1, **options):
    return sent_in(name, clip=max_grad_norm, accumulation=accumulation, options=options)


def summary(found):
    return sorted((c.kind, c.payload_bytes, c.in_branch) for c in found)


def coded(payload):
    return [("all-gather", payload, False), ("all-reduce", SMALL, False), ("all-to-all", payload, False)]


PADDED = 4 * (20 + 4 + 12 + 1) * 4  # leaves of 80, 16, 48 and 3 values, each in 4 equal parts
ZERO1 = [
    ("all-gather", PADDED, False),
    ("all-reduce", SMALL + 4, False),  # the gradient norm is reduced with the metrics
    ("reduce-scatter", PADDED, False),
]
NOW_AND_THEN = [("all-reduce", SMALL, False), ("all-reduce", 4 * SIZE, True)]
SENT = {
    "mean": ({}, [("all-reduce", 4 * SIZE + SMALL, False)]),  # gradients and metrics together
    # 147 values in 4 parts of 37 (148 in all); with blocks of 16, parts of 48 (192), a scale of 4 bytes each.
    "fp16": ({}, coded(2 * 148)),
    "bf16": ({}, coded(2 * 148)),
    "int8": ({"block": 16}, coded(192 + 12 * 4)),
    "zero1": ({}, ZERO1),
    "zero1, clipped": ({"max_grad_norm": 1.0}, ZERO1),  # uses the norm that is measured anyway
    "local_sgd": ({"every": 8}, NOW_AND_THEN),
    "diloco": ({"every": 8}, NOW_AND_THEN),
    "power_sgd": (
        {"rank": 2, "min_compression": 0, "start_iter": 0},
        # P: (5 + 16) rows of 2, with 19 biases; Q: (16 + 3) rows of 2, with the metrics
        [
            ("all-reduce", 4 * 2 * (16 + 3) + SMALL, False),
            ("all-reduce", 4 * (2 * (5 + 16) + 19), False),
        ],
    ),
}


# In micro-batches, which send nothing: one that sums, one with parts, one that encodes, one not every step.
# The step accumulates, not the strategy. (fsdp gathers again for each micro-batch.)
ACCUMULATED = ("mean", "zero1", "int8", "diloco")


@pytest.mark.parametrize("row", SENT)
def test_a_step_sends_what_its_strategy_says(row):
    options, expected = SENT[row]
    found = sent(row.partition(",")[0], accumulation=4 if row in ACCUMULATED else 1, **options)
    assert summary(found) == expected
    assert not any(c.in_loop for c in found)


def test_bucketed_sends_the_same_bytes_in_parts():
    # leaves of 64, 320, 12, 192 bytes in tree order; a bucket of 256 bytes holds the last two
    found = sent("bucketed", bucket_size_mb=256 / 2**20)
    assert len([c for c in found if c.payload_bytes > SMALL]) == 3
    assert sum(c.payload_bytes for c in found) == 4 * SIZE + SMALL
    assert len(sent("bucketed", bucket_size_mb=25)) <= 2


@pytest.mark.parametrize(
    ("sizes", "filled"),
    [
        ([4, 4, 4, 4], [[3, 2], [1, 0]]),
        ([100, 4, 4], [[2, 1], [0]]),  # larger than a bucket: on its own
        ([4, 100, 4], [[2], [1], [0]]),
        ([], []),
        ([4, 0], [[1, 0]]),
    ],
)
def test_buckets_fill_from_the_last_leaf(sizes, filled):
    assert buckets(sizes, 8) == filled


@pytest.mark.parametrize("name", ["bf16", "int8", "zero1"])
def test_large_exchanges_over_gloo_go_in_pieces_and_arrive_whole(monkeypatch, name):
    grads = [random_grads(REPLICAS, t) for t in range(3)]

    def exchanged():
        """(number of all-to-alls in a step, parameters after three)."""
        alone = Alone(built(name, optax.sgd(0.1), USUAL[name]), REPLICAS)
        hlo = alone.update.lower(alone.state, put_rows(alone.mesh, grads[0])).compile().as_text()
        return [c.kind for c in collectives(hlo)].count("all-to-all"), alone.step(*grads).copies()[0]

    monkeypatch.setattr("cyxjax.core.exchange.sends_one_by_one", lambda mesh: True)
    count, whole = exchanged()
    monkeypatch.setattr("cyxjax.core.exchange._PIECE_BYTES", 6)  # 3, 3 and 2 of eight 16-bit numbers
    more, in_pieces = exchanged()
    assert more > count
    jax.tree.map(np.testing.assert_array_equal, in_pieces, whole)


def test_power_sgd_sends_whole_gradients_before_it_starts():
    later = sent("power_sgd", rank=2, min_compression=0, start_iter=5)
    assert {c.payload_bytes for c in later if c.in_branch} >= {4 * SIZE, 4 * 2 * (16 + 3)}


@pytest.mark.parametrize("name", ["mean", "zero1", "local_sgd"])
def test_evaluation_sends_its_sums_only(name):
    assert summary(sent_in(name, evaluate=True)) == [("all-reduce", SMALL - 8, False)]


def test_the_reader_would_see_a_reduction_in_a_loop():
    # A mutation: reduce the gradients of each micro-step, as a careless accumulation does.
    from cyxjax.core.replica import sync_map

    def careless(rows):
        return jax.lax.scan(lambda c, g: (c + jax.lax.psum(g, "data"), None), jnp.zeros(3), rows[0])[0]

    mesh = build_mesh(jax.devices()[:REPLICAS])
    mapped = jax.jit(sync_map(careless, mesh, PER_REPLICA, jax.sharding.PartitionSpec()))
    found = collectives(mapped.lower(np.ones((REPLICAS, 5, 3), np.float32)).compile().as_text())
    assert [(c.kind, c.payload_bytes, c.times, c.in_loop) for c in found] == [("all-reduce", 12, 5, True)]


def test_lines_of_other_compilers_are_read_too():
    gpu = """HloModule jit_step, num_partitions=8
%body (p: f32[2]) -> f32[2] {
  %s = bf16[8,4]{1,0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}
}
ENTRY %main (p: f32[2]) -> f32[2] {
  %a = (f32[3]{0}, f32[24]{0}) all-gather-start(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %b = (f32[10]{0}, s8[6]{0}) all-reduce-start(%p, %q), replica_groups={}, to_apply=%add
  %w = f32[2] while(%p), condition=%cond, body=%body
}
"""
    assert collectives(gpu) == [
        Collective("all-gather", 96, 8),
        Collective("all-reduce", 46, 8, num_arrays=2),
        Collective("reduce-scatter", 8 * 64, 8, in_loop=True),
    ]


def test_one_replica_sends_nothing():
    assert sent_in("mean", replicas=1) == []


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an integer power
def test_the_command_prints_the_plan_and_writes_nothing(cwd, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    options = ["--cpu-devices", "8", "--comm", "zero1", "--data.name", "digits", "--model.name", "mlp"]
    assert cli.main(["plan", "--config", str(ROOT / "configs" / "digits.yaml"), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    sent = sorted(line.split()[0] for line in lines if "payload" in line)
    assert sent == ["all-gather", "all-reduce", "reduce-scatter"]
    assert max(map(len, lines)) <= 60
    assert not list(cwd.iterdir())


def test_the_plan_is_one_object_for_a_script(capsys, cwd):
    words = ["--data.name", "digits", "--model.name", "mlp", "--optimizer.name", "sgd"]
    words += ["--bandwidth", "1Gbit", "--latency", "1s", "--mtbf", "10h", "--replicas", "1:4"]
    assert cli.main(["plan", "--json", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    # An all-reduce over 4 waits 2 x 2 latencies; its 0.08 MB (below) take a few ms.
    step_s = {count: took["mean"] - plan["compute_s"] for count, took in plan["step_s"].items()}
    assert step_s == pytest.approx({"1": 0, "2": 2, "4": 4}, abs=0.01)
    assert [row["replicas"] for row in plan["failures"]] == [1, 2, 4]
    assert plan["comm"] == "mean"
    assert plan["sent_bytes_per_replica"] == sum(
        2 * one["payload_bytes"] * 7 // 8 for one in plan["collectives"] if one["kind"] == "all-reduce"
    )
    assert plan["state_bytes"]["params"] == 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert plan["flops_per_replica"] > 2 * 32 * (2 * 64 * 256)
    assert not list(cwd.iterdir())
