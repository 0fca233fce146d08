"""The ledger is the same at every world size; the audit names the first step that is wrong, and how."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyxjax.data.audit import audit, find_places, surviving
from cyxjax.data.ledger import Fingerprint, Ledger, StreamFacts, fingerprint, fingerprints
from cyxjax.data.ledger_file import Entry
from cyxjax.errors import DataError

FACTS = StreamFacts(23, 4, drop_last=False, seed=9, shuffle=True)  # 6 steps an epoch, the last of 3 samples


def order(epoch, start, stop):
    return FACTS.ids(epoch, start, stop)


def steps_of(facts, epoch=0, first=0):
    """(epoch, first, stop) of the steps from a place on, for ever."""
    while True:
        plan = facts.plan(first)
        for step in range(plan.num_steps):
            yield epoch, plan.start(step), plan.stop(step)
        epoch, first = epoch + 1, 0


def run(num_steps, *, start=None, change=None, facts=FACTS, at=(0, 0), placed=True):
    """The entries up to a step; `change(step, places, ids) -> (places, ids)` is what a bug would do.

    start: the ledger to go on from, which stands at `at`. placed: whether records say where they began.
    """
    ledger, entries = start or Ledger(), []
    for step, (epoch, first, stop) in zip(range(ledger.steps, num_steps), steps_of(facts, *at), strict=False):
        places, ids = np.arange(first, stop), facts.ids(epoch, first, stop)
        if change:
            places, ids = change(step, places, ids)
        ledger = ledger.extend(epoch, fingerprint(places, ids), first if placed else None)
        entries.append(Entry(facts, ledger))
    return entries


both_forms = pytest.mark.parametrize("placed", [True, False], ids=["", "of_before_places"])


def replaced(step, ids_of_step):
    return lambda s, places, ids: (places, np.asarray(ids_of_step(ids))) if s == step else (places, ids)


@both_forms
def test_a_faithful_run_has_no_findings(placed):
    records = run(20, placed=placed)
    assert audit(records) == []
    assert records[5].ledger.samples == 23  # one epoch: every sample once, the last step short


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_shares_add_up_to_the_same_ledger(ranks):
    places, ids = np.arange(8, 20), order(0, 8, 20)
    shares = [fingerprint(places[r::ranks], ids[r::ranks]) for r in range(ranks)]
    assert sum(shares, Fingerprint()) == fingerprint(places, ids)


def test_padding_is_not_consumed():
    # Two steps of four rows; the second holds one sample, and three rows that fill it up.
    places, ids = np.arange(8).reshape(2, 4), np.array([[3, 1, 2, 0], [4, 3, 1, 2]])
    real = np.array([[True] * 4, [True, False, False, False]])
    shares = fingerprints(places, ids, real)
    assert shares == [fingerprint(places[0], ids[0]), fingerprint(places[1, :1], ids[1, :1])]


def test_resumes_leave_no_trace_in_the_chain():
    whole = run(20)
    first = run(9)
    saved = Ledger.from_json(json.loads(json.dumps(first[6].ledger.to_json())))
    resumed = run(20, start=saved, at=(1, 4))
    assert resumed[-1] == whole[-1]
    # The file holds steps 7 and 8 twice; they count once.
    assert surviving(first + resumed) == whole
    assert audit(first + resumed) == []


@pytest.mark.parametrize(
    ("ids_of_step_8", "kind", "words"),
    [
        (lambda ids: ids[::-1], "reordered", "not in their order"),
        (lambda ids: order(1, 4, 8), "repeated", "places 4 to 7, which were consumed before"),
        (lambda ids: order(1, 10, 14), "skipped", "places 8 to 9 of epoch 1 were left out"),
        (lambda ids: [*ids[:3], ids[0]], "altered", "4 samples that are not"),
    ],
)
@both_forms
def test_a_wrong_batch_is_named_and_explained(ids_of_step_8, kind, words, placed):
    (finding,) = audit(run(20, change=replaced(8, ids_of_step_8), placed=placed))
    assert (finding.step, finding.kind) == (8, kind)
    assert words in str(finding)


def test_a_resume_from_the_wrong_place_is_found_at_its_first_step():
    def one_late(step, places, ids):
        return (places, np.roll(order(0, 0, 23), -1)[places]) if step >= 2 else (places, ids)

    findings = audit(run(5, change=one_late))
    assert [finding.step for finding in findings] == [2, 3, 4]
    assert "places 8 to 8 of epoch 0 were left out" in str(findings[0])


def test_a_short_step_and_a_dropped_one_are_found():
    short = lambda s, places, ids: (places[:3], ids[:3]) if s == 7 else (places, ids)  # noqa: E731
    records = run(20, change=short, placed=False)
    assert [(f.step, f.kind) for f in audit(records)] == [(7, "skipped")]
    found = [(f.step, f.kind) for f in audit(run(20, change=short))]
    assert found == [(7, "skipped"), (8, "skipped")]  # the step's own count, and the place that nobody had
    gap = run(4) + run(8)[6:]
    assert [(f.step, f.kind) for f in audit(gap)] == [(4, "missing")]


def test_an_edited_record_breaks_the_chain():
    records = run(6)
    edited = Ledger(3, 12, 0, records[2].ledger.last, "0" * 64, 8)
    records[2] = records[2]._replace(ledger=edited)
    assert [(f.step, f.kind) for f in audit(records)] == [(2, "chain"), (3, "chain")]


def test_findings_stop_at_the_bound():
    bad = run(100, change=lambda s, places, ids: (places, ids[::-1]))
    assert len(audit(bad, max_findings=7)) == 7


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_swap_or_substitution_is_caught(data):
    step = data.draw(st.integers(0, 11))
    _, first, stop = list(zip(range(12), steps_of(FACTS), strict=False))[step][1]
    i = data.draw(st.integers(0, stop - first - 1))
    other = data.draw(st.integers(0, FACTS.num_samples - 1))

    def substitute(ids):
        ids = ids.copy()
        ids[i] = (ids[i] + 1 + other) % (FACTS.num_samples + 1)
        return ids

    changed = run(12, change=replaced(step, substitute))
    assert (audit(changed) == []) == (other == FACTS.num_samples)
    assert audit(run(12, change=replaced(step, lambda ids: np.roll(ids, 1))))[0].step == step


def test_places_are_found_across_scan_borders(monkeypatch):
    monkeypatch.setattr("cyxjax.data.audit._SCAN", 4)
    ids = order(3, 0, 23)
    windows = [fingerprint(np.arange(4), ids[start : start + 4]) for start in range(20)]
    assert [find_places(window, 3, FACTS) for window in windows] == list(range(20))
    assert find_places(fingerprint(np.arange(4), ids[[0, 1, 2, 4]]), 3, FACTS) is None


CHANGED = [{"global_batch_size": 5}, {"global_batch_size": 16}, {"drop_last": True}]


@pytest.mark.parametrize("changes", CHANGED, ids=str)
@pytest.mark.parametrize("cut", [1, 5, 6, 9])
def test_a_run_resumed_at_another_size_at_any_sample_is_whole(changes, cut):
    first = run(cut)
    at = ((cut - 1) // 6, first[-1].ledger.first + first[-1].ledger.last.num_samples)
    resumed = run(cut + 8, start=first[-1].ledger, facts=FACTS._replace(**changes), at=at)
    again = run(
        cut + 20, start=resumed[3].ledger, at=place_after(resumed[3])
    )  # and back, from its fourth step
    assert audit(first + resumed + again) == []


def place_after(entry):
    return entry.ledger.epoch, entry.ledger.first + entry.ledger.last.num_samples


@pytest.mark.parametrize(
    ("at", "kind", "words"),
    [
        (
            (1, 2),
            "repeated",
            "places 2 to 3 of epoch 1 were consumed before",
        ),  # batches taken for smaller ones
        ((1, 8), "skipped", "places 4 to 7 of epoch 1 were left out"),  # ... for larger ones
        ((2, 0), "skipped", "places 4 to 22 of epoch 1 were left out"),  # the epoch counted as over
        ((1, 0), "repeated", "places 0 to 3 of epoch 1 were consumed before"),
        ((3, 0), "skipped", "nothing is recorded of 2"),
    ],
)
def test_a_resume_at_another_size_from_the_wrong_sample_is_found(at, kind, words):
    first = run(7)  # four samples into epoch 1
    found = audit(first + run(12, start=first[-1].ledger, facts=FACTS._replace(global_batch_size=5), at=at))
    assert any((f.step, f.kind) == (7, kind) and words in f.text for f in found), found


def test_an_order_changed_within_an_epoch_is_found_and_counted():
    first = run(8)
    changed = run(12, start=first[-1].ledger, facts=FACTS._replace(seed=1), at=(1, 8))
    (finding,) = audit(first + changed)
    used, rest = set(order(1, 0, 8).tolist()), set(FACTS._replace(seed=1).ids(1, 8, 23).tolist())
    assert f"{len(used & rest)} samples come twice in it, {23 - len(used | rest)} never" in finding.text
    whole = run(6)
    assert audit(whole + run(9, start=whole[-1].ledger, facts=FACTS._replace(seed=1), at=(1, 0))) == []


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
        Ledger.from_json(run(3)[-1].ledger.to_json() | change)


def test_epochs_never_go_back():
    with pytest.raises(DataError, match="epoch 0 after one of epoch 1"):
        run(8)[-1].ledger.extend(0, Fingerprint())
