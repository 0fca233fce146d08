"""scripts/bench: how its programs evaluate their runs; simulated hosts with the launcher's policy."""

import argparse
import importlib
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cyxjax.observe import scaling

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports a program of scripts/bench by its name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_the_table_says_how_far_off_a_plan_is(bench, monkeypatch):
    plan = bench("plan")
    assert (
        plan.table([("mlp", "mean", 2, 0.0015, 0.001)]).splitlines()[2]
        == "| mlp | mean | 2 | 1.50 ms | 1.00 ms | +50% |"
    )
    # with more processes than cores, each is slower
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 2)
    waits = [plan.waiting_for_cores({"compute_s": 3.0}, processes) for processes in plan.PROCESSES]
    assert waits == [0.0, 0.0, 3.0]


def test_a_row_holds_medians_and_the_ratio_of_turns_that_followed_each_other(bench):
    # ours / torch turn by turn: 2, 0.5, 1 -> 1, though the medians' ratio is 20 / 10 = 2
    turns = {"ours": [20.0, 5.0, 30.0], "torch": [10.0, 10.0, 30.0], "keras": ["not run: no keras"]}
    args = argparse.Namespace(peers=list(turns), turns=3, device="cpu", peak_tflops=None)
    row = bench("peers").table({"mlp, 1 process": turns}, args).splitlines()[-1]
    assert row == "| mlp, 1 process | 20 | 10 (1.00) | not run: no keras |"


def test_what_takes_too_long_is_ended_and_said(bench, monkeypatch):
    peers, started, popen = bench("peers"), [], subprocess.Popen
    monkeypatch.setattr(
        peers.subprocess, "Popen", lambda *a, **kw: started.append(popen(*a, **kw)) or started[0]
    )
    assert peers.run(["sleep", "600"], devices=1, limit_s=0.2) == ("", "nothing within 0.2 s")
    assert started[0].returncode == -signal.SIGKILL


@pytest.fixture
def simulate(bench):
    return bench("simulate")


def test_the_goodput_of_a_job_with_spares_is_that_of_the_formula(simulate):
    hosts, mtbf_s, save_s = 40, 40 * 3600.0, 60.0  # the job fails once an hour
    best_s = scaling.save_every_s(save_s, mtbf_s / hosts)
    # The first host never fails: 39/40 of the failures. 600 of them: the share is known to about 1 %.
    plain = simulate.Cluster(hosts, 12, mtbf_s * 39 / 40, best_s, low=hosts)
    found = {f: simulate.simulate(replace(plain, every_s=f * best_s), 600) for f in (1.0, 0.3, 4.0)}
    for factor, result in found.items():
        share = scaling.goodput(factor * best_s, save_s, result.restart_s, mtbf_s / hosts)
        assert result.goodput == pytest.approx(share, abs=0.02), factor
    assert found[1.0].goodput > max(found[0.3].goodput, found[4.0].goodput) + 0.03
    # A silent host is noticed after 10 s; 1 s to end the others, 90 s to start; an exception needs less.
    assert 92 < found[1.0].restart_s < 102


def test_leading_more_hosts_takes_so_many_more_messages_and_no_more(simulate):
    """A start costs a call, an order to end and an end per host: a faster growth would be noticed here."""
    cluster = simulate.Cluster(50, 10, 1e5, 600.0, low=50)
    small, large = (simulate.simulate(replace(cluster, hosts=n, spares=10, low=n), 40) for n in (50, 400))
    assert small.messages == pytest.approx(3 * 50, rel=0.35)
    assert large.messages == pytest.approx(3 * 400, rel=0.1)


def test_hosts_that_fail_and_are_not_replaced_are_waited_for_or_gone_on_without(simulate):
    cluster = simulate.Cluster(20, 0, 20 * 3600.0, 600.0, low=20, repair_s=7200.0)
    waits, goes_on = (simulate.simulate(replace(cluster, low=low), 100) for low in (20, 1))
    assert waits.end == goes_on.end == ""
    assert goes_on.goodput > waits.goodput + 0.1


def test_an_exception_that_never_lets_it_come_further_ends_the_job_by_the_budget(simulate):
    cluster = simulate.Cluster(4, 0, 400.0, 10_000.0, exceptions=1.0)  # fails long before its first save
    result = simulate.simulate(cluster, 1000)
    assert "restarts came no further than step" in result.end
    assert result.goodput == 0


def test_ranks_of_several_processes_meet_hear_of_a_death_and_are_seen_to_go(bench, monkeypatch):
    rendezvous = bench("rendezvous")
    monkeypatch.setattr(rendezvous, "PROCESSES", 2)
    turn = rendezvous.turn(12)
    assert min(turn.met[0], turn.told[0], turn.gone[0]) > 0
    assert rendezvous.table(12, [turn]).splitlines()[2].startswith("| 12 ranks meet | ")
