"""The step time at other sizes, and the best save interval: computed by hand, and compared with runs."""

import math

import jax
import numpy as np
import pytest

from cyxjax.cli import plan
from cyxjax.observe import scaling
from cyxjax.observe.scaling import Wire, Work
from cyxjax.sync.entry import Exchange


@pytest.mark.parametrize(
    ("sent", "replicas", "seconds"),
    [
        # All-reduce of 1 MB by 4: 2 x (2 latencies + 3/4 s); one way half of it; in each fourth step 1/4.
        (Exchange(True, 1e6), 4, 2 * (0.002 + 0.75)),
        (Exchange(False, 1e6), 4, 0.752),
        (Exchange(True, 1e6, 1 / 4), 4, 0.376),
        (Exchange(True, 1e6), 1, 0.0),
    ],
)
def test_an_exchange_takes_latencies_and_bytes(sent, replicas, seconds):
    assert scaling.step_s([sent], 0, replicas, Wire(1e6, 0.001)) == pytest.approx(seconds)


def test_strategies_send_what_they_say():
    params = {
        "w": jax.ShapeDtypeStruct((1000, 500), np.float32),
        "b": jax.ShapeDtypeStruct((500,), np.float32),
    }
    one_s = {
        name: scaling.step_s(parts, 0, 2, Wire(1e6, 1e-12))
        for name, parts in scaling.exchanges(params).items()
    }
    whole = 4 * 500_500 / 1e6  # seconds of an all-reduce by two: 2 x 1/2 of the bytes
    thin = 4 * (4 * 1500 + 500) / 1e6  # rank 4: two thin matrices, and the bias as it is
    wanted = {"mean": whole, "bf16": whole / 2, "int8": whole / 4 * (1 + 4 / 256), "zero1": whole}
    wanted |= {"fsdp": 1.5 * whole, "local_sgd": whole / 8, "diloco": whole / 50, "power_sgd": thin}
    assert {name: one_s[name] for name in wanted} == pytest.approx(wanted)


def test_a_curve_names_the_quickest_and_an_epoch():
    work = Work(0.1, 1000, 10, 10**9)
    sent = {"mean": [Exchange(True, 1e6)], "bf16": [Exchange(False, 5e5, 2)], "diloco": [Exchange(True, 1.0)]}
    lines = list(scaling.curve(work, sent, Wire(1e6, 1e-9), (1, 4)))
    assert max(map(len, lines)) <= 80
    assert lines[3].split() == ["1", "100.00", "100.00", "100.00"]
    # 4 replicas: 25 steps of 0.1 + 2 x 3/4 x 0.5 = 0.85 s (and the latencies) under bf16.
    assert lines[4].split() == ["4", "1600.00", "850.00", "100.00"]
    assert lines[6].split() == ["1", "mean", "100", "steps,", "10.0", "s"]
    assert lines[7].split() == ["4", "bf16", "25", "steps,", "21.3", "s"]


def test_saves_are_as_often_as_daly_says_and_no_other_interval_is_better():
    save_s, mtbf_s, restart_s = 60.0, 86_400.0, 300.0
    best_s = scaling.save_every_s(save_s, mtbf_s)
    assert best_s == pytest.approx(math.sqrt(2 * save_s * mtbf_s), rel=0.02)  # Young's, for rare failures
    here = scaling.goodput(best_s, save_s, restart_s, mtbf_s)
    others = [scaling.goodput(best_s * f, save_s, restart_s, mtbf_s) for f in (0.5, 0.8, 1.25, 2)]
    assert here > max(others)
    # Rare failures: the loss is the saves, half an interval per failure, and the restarts.
    lost = save_s / best_s + (best_s / 2 + restart_s) / mtbf_s
    assert 1 - here == pytest.approx(lost, rel=0.1)
    assert scaling.save_every_s(100, 10) == 10
    assert scaling.goodput(1e6, 1, 1, 1) == 0


def test_own_options_are_read_and_taken_out_of_the_words_of_an_experiment():
    rates = ("100Gbit", "12.5GB", "100mbit", "8bit", "3kB")
    assert list(map(plan.rate, rates)) == [12.5e9, 12.5e9, 12.5e6, 1.0, 3000.0]
    times = ("5us", "2ms", "3s", "4min", "1000h", "1d")
    assert list(map(plan.time_span, times)) == pytest.approx([5e-6, 2e-3, 3, 240, 3.6e6, 86_400])
    assert plan.replica_counts("3:9") == (3, 4, 8, 9)
    words = ["--config", "x.yaml", "--mtbf=10h", "--latency", "1us", "--no-shuffle", "--epochs", "3"]
    own, rest = plan.own_options(words)
    assert rest == ["--config", "x.yaml", "--no-shuffle", "--epochs", "3"]
    assert (own.mtbf, own.wire) == (36_000, Wire(1.25e9, pytest.approx(1e-6)))
    assert plan.own_options(["-h"])[0].wire is None
