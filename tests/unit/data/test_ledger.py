"""The ledger is the same at every world size; the audit names the first step that is wrong, and how."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyxjax.data.audit import StreamPlan, audit, find_places, surviving
from cyxjax.data.ledger import Fingerprint, Ledger, fingerprint
from cyxjax.errors import DataError

PLAN = StreamPlan(num_samples=23, global_batch_size=4)  # 6 steps an epoch, the last of 3 samples


def order(epoch, start, stop):
    return np.random.default_rng(epoch).permutation(PLAN.num_samples)[start:stop]


def run(num_steps, *, start=None, change=None):
    """The ledgers of steps; `change(step, places, ids) -> (places, ids)` is what a bug would do."""
    ledger, records = start or Ledger(), []
    for step in range(ledger.steps, num_steps):
        epoch, first, stop = PLAN.places(step)
        places, ids = np.arange(first, stop), order(epoch, first, stop)
        if change:
            places, ids = change(step, places, ids)
        ledger = ledger.extend(epoch, fingerprint(places, ids))
        records.append(ledger)
    return records


def replaced(step, ids_of_step):
    return lambda s, places, ids: (places, np.asarray(ids_of_step(ids))) if s == step else (places, ids)


def test_a_faithful_run_has_no_findings():
    records = run(20)
    assert audit(records, order, PLAN) == []
    assert records[5].samples == 23  # one epoch: every sample once, the last step short


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_shares_add_up_to_the_same_ledger(ranks):
    places, ids = np.arange(8, 20), order(0, 8, 20)
    shares = [fingerprint(places[r::ranks], ids[r::ranks]) for r in range(ranks)]
    assert sum(shares, Fingerprint()) == fingerprint(places, ids)


def test_resumes_leave_no_trace_in_the_chain():
    whole = run(20)
    first = run(9)
    resumed = run(20, start=Ledger.from_json(json.loads(json.dumps(first[6].to_json()))))
    assert resumed[-1] == whole[-1]
    # The file holds steps 7 and 8 twice; they count once.
    assert surviving(first + resumed) == whole
    assert audit(first + resumed, order, PLAN) == []


@pytest.mark.parametrize(
    ("ids_of_step_8", "kind", "words"),
    [
        (lambda ids: ids[::-1], "reordered", "not in their order"),
        (lambda ids: order(1, 4, 8), "repeated", "places 4 to 7, which were consumed before"),
        (lambda ids: order(1, 10, 14), "skipped", "places 8 to 9 of epoch 1 were left out"),
        (lambda ids: [*ids[:3], ids[0]], "altered", "4 samples that are not"),
    ],
)
def test_a_wrong_batch_is_named_and_explained(ids_of_step_8, kind, words):
    (finding,) = audit(run(20, change=replaced(8, ids_of_step_8)), order, PLAN)
    assert (finding.step, finding.kind) == (8, kind)
    assert words in str(finding)


def test_a_resume_from_the_wrong_place_is_found_at_its_first_step():
    def one_late(step, places, ids):
        return (places, np.roll(order(0, 0, 23), -1)[places]) if step >= 2 else (places, ids)

    findings = audit(run(5, change=one_late), order, PLAN)
    assert [finding.step for finding in findings] == [2, 3, 4]
    assert "places 8 to 8 of epoch 0 were left out" in str(findings[0])


def test_a_short_step_and_a_dropped_one_are_found():
    records = run(20, change=lambda s, places, ids: (places[:3], ids[:3]) if s == 7 else (places, ids))
    assert [(f.step, f.kind) for f in audit(records, order, PLAN)] == [(7, "skipped")]
    gap = run(4) + run(8)[6:]
    assert [(f.step, f.kind) for f in audit(gap, order, PLAN)] == [(4, "missing")]


def test_an_edited_record_breaks_the_chain():
    records = run(6)
    records[2] = Ledger(3, 12, 0, records[2].last, "0" * 64)
    assert [(f.step, f.kind) for f in audit(records, order, PLAN)] == [(2, "chain"), (3, "chain")]


def test_findings_stop_at_the_bound():
    bad = run(100, change=lambda s, places, ids: (places, ids[::-1]))
    assert len(audit(bad, order, PLAN, max_findings=7)) == 7


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_swap_or_substitution_is_caught(data):
    step = data.draw(st.integers(0, 11))
    _, first, stop = PLAN.places(step)
    i = data.draw(st.integers(0, stop - first - 1))
    other = data.draw(st.integers(0, PLAN.num_samples - 1))

    def substitute(ids):
        ids = ids.copy()
        ids[i] = (ids[i] + 1 + other) % (PLAN.num_samples + 1)
        return ids

    changed = run(12, change=replaced(step, substitute))
    assert (audit(changed, order, PLAN) == []) == (other == PLAN.num_samples)
    assert audit(run(12, change=replaced(step, lambda ids: np.roll(ids, 1))), order, PLAN)[0].step == step


def test_places_are_found_across_scan_borders(monkeypatch):
    monkeypatch.setattr("cyxjax.data.audit._SCAN", 4)
    ids = order(3, 0, 23)
    windows = [fingerprint(np.arange(4), ids[start : start + 4]) for start in range(20)]
    assert [find_places(window, 3, order, PLAN) for window in windows] == list(range(20))
    assert find_places(fingerprint(np.arange(4), ids[[0, 1, 2, 4]]), 3, order, PLAN) is None


def test_drop_last_plans_leave_the_tail_out():
    plan = StreamPlan(23, 4, drop_last=True)
    assert [plan.places(s) for s in (4, 5)] == [(0, 16, 20), (1, 0, 4)]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (3, 4)])
def test_plans_without_a_step_are_refused(sizes):
    with pytest.raises(DataError, match="no step"):
        StreamPlan(*sizes, drop_last=True)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -1},
        {"steps": "1"},
        {"digest": "00"},
        {"digest": 3},
        {"last": [1]},
        {"last": [1, "0", "0"]},
        {"x": 1},
    ],
)
def test_only_ledgers_are_read_as_ledgers(change):
    with pytest.raises(DataError, match="Not a ledger"):
        Ledger.from_json(run(3)[-1].to_json() | change)


def test_epochs_never_go_back():
    with pytest.raises(DataError, match="epoch 0 after one of epoch 1"):
        run(8)[-1].extend(0, Fingerprint())
