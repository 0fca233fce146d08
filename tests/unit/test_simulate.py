"""Simulated hosts under the launcher's own policy, and real ranks that meet at once."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from cyxjax.observe.scaling import goodput, save_every_s

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def simulate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("simulate")


def test_the_goodput_of_a_job_with_spares_is_that_of_the_formula(simulate):
    hosts, mtbf_s, save_s = 40, 40 * 3600.0, 60.0  # the job fails once an hour
    best_s = save_every_s(save_s, mtbf_s / hosts)
    # The first host never fails: 39/40 of the failures. 600 of them: the share is known to about 1 %.
    plain = simulate.Cluster(hosts, 12, mtbf_s * 39 / 40, best_s, low=hosts)
    found = {f: simulate.simulate(replace(plain, every_s=f * best_s), 600) for f in (1.0, 0.3, 4.0)}
    for factor, result in found.items():
        share = goodput(factor * best_s, save_s, result.restart_s, mtbf_s / hosts)
        assert result.goodput == pytest.approx(share, abs=0.02), factor
    assert found[1.0].goodput > max(found[0.3].goodput, found[4.0].goodput) + 0.03
    # A silent host is noticed after 10 s; 1 s to end the others, 90 s to start; an exception needs less.
    assert 92 < found[1.0].restart_s < 102


def test_leading_more_hosts_takes_so_many_more_messages_and_no_more(simulate):
    """A start is a call, an order to end and an end for each host: what grew faster would show here."""
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


def test_ranks_of_several_processes_meet_hear_of_a_death_and_are_seen_to_go(simulate, monkeypatch):
    rendezvous = importlib.import_module("rendezvous")
    monkeypatch.setattr(rendezvous, "PROCESSES", 2)
    turn = rendezvous.turn(12)
    assert min(turn.met[0], turn.told[0], turn.gone[0]) > 0
    assert rendezvous.table(12, [turn]).splitlines()[2].startswith("| 12 ranks meet | ")
