"""The ledger is the same at every world size; the audit names the first span that is wrong, and how."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyxjax.data import ledger
from cyxjax.data.ledger import (
    Delivered,
    Record,
    Span,
    StreamFacts,
    Tally,
    audit,
    delivered,
    span_of_step,
    walk,
)
from cyxjax.data.order import mix

FACTS = StreamFacts(23, 4, drop_last=False, seed=9, shuffle=True)  # 6 steps an epoch, the last of 3 samples


def held(ids):
    ids = np.asarray(ids)[None]
    return delivered(ids, np.ones(ids.shape, bool))[0]


def run(*cuts, facts=FACTS, change=lambda number, ids: ids, at=(0, 0)):
    """Records of spans that end at `cuts`, places (epoch, stop); change(number of span, ids) -> ids."""
    records, (epoch, first) = [], at
    for cut_epoch, stop in cuts:
        while (epoch, first) < (cut_epoch, stop):
            last = stop if epoch == cut_epoch else facts.plan(first).num_used + first
            if last > first:
                ids = change(len(records), facts.ids(epoch, first, last))
                steps = -(-(last - first) // facts.global_batch_size)
                records.append(Record(facts, Span(epoch, first, last, steps, held(ids))))
            epoch, first = (epoch, last) if epoch == cut_epoch else (epoch + 1, 0)
    return records


CUTS = [(0, 8), (0, 20), (1, 4), (1, 12), (2, 0), (2, 16), (3, 0)]


def test_a_faithful_run_has_no_findings():
    records = run(*CUTS)
    assert audit(records) == []
    end = list(walk(records))[-1].after
    assert (end.steps, end.samples) == (
        18,
        69,
    )  # three epochs: every sample once in each, the last step short


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_shares_add_up_to_the_same_span(ranks):
    ids = FACTS.ids(0, 8, 20)
    total = Delivered()
    for rank in range(ranks):
        total = total.plus(held(ids[rank::ranks]))
    assert total == held(ids) == FACTS.promised(0, 8, 20)


def test_padding_is_not_consumed():
    # Two steps of four rows; the second holds one sample, and three rows that fill it up.
    ids = np.array([[3, 1, 2, 0], [4, 3, 1, 2]])
    real = np.array([[True] * 4, [True, False, False, False]])
    assert delivered(ids, real) == [held([3, 1, 2, 0]), held([4])]


def test_sums_of_many_ids_are_made_in_parts(monkeypatch):
    whole = FACTS.promised(1, 3, 23)
    monkeypatch.setattr(ledger, "_AT_ONCE", 4)
    assert FACTS.promised(1, 3, 23) == whole


@pytest.mark.parametrize(
    ("ids_of_span_4", "kind", "said"),
    [
        (lambda ids: ids[:-1], "skipped", "is missing"),
        (lambda ids: np.append(ids, ids[2]), "repeated", "came once more"),
        (
            lambda ids: [*ids[:-1], ids[0]],
            "altered",
            "8 samples that are not the 8 of places 4 to 11 of epoch 1",
        ),
        (lambda ids: ids[:-3], "skipped", "5 samples"),
        (lambda ids: [], "skipped", "0 samples"),
    ],
)
def test_what_was_lost_doubled_or_taken_for_another_is_named_in_its_span(ids_of_span_4, kind, said):
    records = run(
        *CUTS, change=lambda number, ids: np.asarray(ids_of_span_4(ids), int) if number == 4 else ids
    )
    (finding,) = audit(records)
    assert (finding.step, finding.kind) == (7, kind)
    assert said in str(finding)


def test_the_one_sample_that_is_missing_or_came_twice_is_named():
    for change, said in ((lambda ids: ids[1:], "missing"), (lambda ids: [*ids, ids[0]], "once more")):
        (finding,) = audit(
            run(*CUTS, change=lambda n, ids, change=change: np.array(change(ids)) if n == 0 else ids)
        )
        assert f"sample {FACTS.ids(0, 0, 1)[0]} " in finding.text
        assert said in finding.text


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_substitution_is_caught(data):
    number, other = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 23))

    def substitute(at, ids):
        ids = ids.copy()
        if at == number:
            i = data.draw(st.integers(0, len(ids) - 1))
            ids[i] = (ids[i] + 1 + other) % 24
        return ids

    assert (audit(run(*CUTS, change=substitute)) == []) == (other == 23)


def test_findings_stop_at_the_bound():
    bad = run(*[(epoch, 8) for epoch in range(50)], change=lambda number, ids: ids[1:])
    assert len(audit(bad, max_findings=7)) == 7


@pytest.mark.parametrize(
    "changes", [{"global_batch_size": 5}, {"global_batch_size": 16}, {"drop_last": True}], ids=str
)
@pytest.mark.parametrize("cut", [(0, 4), (0, 20), (1, 0), (1, 12)])
def test_a_run_resumed_at_another_size_at_any_sample_is_whole(changes, cut):
    first = run(cut)
    second = run((cut[0], cut[1] + 3), (2, 0), facts=FACTS._replace(**changes), at=cut)
    assert audit(first + second + run((4, 8), at=(2, 0))) == []


@pytest.mark.parametrize(
    ("at", "kind", "said"),
    [
        (
            (1, 2),
            "repeated",
            "places 2 to 3 of epoch 1 were consumed before",
        ),  # batches taken for smaller ones
        ((1, 8), "skipped", "places 4 to 7 of epoch 1 were left out"),  # ... for larger ones
        ((2, 0), "skipped", "places 4 to 22 of epoch 1 were left out"),  # the epoch counted as over
        ((1, 0), "repeated", "places 0 to 3 of epoch 1 were consumed before"),
        ((0, 8), "repeated", "of epoch 0"),
        ((3, 0), "skipped", "nothing is recorded of 2"),
    ],
)
def test_a_resume_at_another_size_from_the_wrong_sample_is_found(at, kind, said):
    found = audit(run((1, 4)) + run((4, 8), facts=FACTS._replace(global_batch_size=5), at=at))
    assert any((f.step, f.kind) == (7, kind) and said in f.text for f in found), found


def test_a_line_that_is_gone_is_found():
    records = run(*CUTS)
    found = audit(records[:2] + records[3:])
    assert [(f.step, f.kind) for f in found] == [(5, "skipped")]


def test_an_order_changed_within_an_epoch_is_found():
    first = run((1, 8))
    (finding,) = audit(first + run((2, 0), facts=FACTS._replace(seed=1), at=(1, 8)))
    assert (finding.kind, "seed is 1, was 9" in finding.text) == ("reordered", True)
    assert audit(run((1, 0)) + run((1, 12), facts=FACTS._replace(seed=1), at=(1, 0))) == []


def test_records_and_tallies_are_read_as_they_were_written():
    span = run((0, 8))[0].span
    assert Span.from_json(json.loads(json.dumps(span.to_json()))) == span
    for tally in (Tally().plus(span), Tally(3, 12, None)):
        assert Tally.from_json(json.loads(json.dumps(tally.to_json()))) == tally


OLD = {"steps": 2, "samples": 8, "epoch": 0, "last": [4, "0" * 16, "1" * 16], "digest": "0" * 64}


def test_a_step_of_0_2_0_is_a_span_and_its_checkpoint_is_known_by_its_counts():
    found = Delivered(4, int("1" * 16, 16))
    assert span_of_step(OLD | {"first": 8}) == Span(0, 8, 12, 1, found)
    tally = Tally.from_json(OLD)
    assert tally == Tally(2, 8, None)
    assert tally.same(Tally(2, 8, 77))
    assert not tally.same(Tally(2, 7, 77))
    assert not Tally(2, 8, 76).same(Tally(2, 8, 77))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -1},
        {"steps": "1"},
        {"sum": "x"},
        {"sum": 3},
        {"x": 1},
        {"stop": 0},
        {"samples": True},
        {"steps": 0},
    ],
)
def test_only_spans_are_read_as_spans(change):
    with pytest.raises((ValueError, TypeError)):
        Span.from_json(run((0, 8))[0].span.to_json() | change)


@pytest.mark.parametrize("change", [{"last": [1]}, {"last": [1, "0", "x"]}, {"first": -1}, {"epoch": None}])
def test_only_steps_are_read_as_steps(change):
    with pytest.raises((ValueError, TypeError)):
        span_of_step(OLD | {"first": 8} | change)


def test_ids_are_mixed_so_that_sums_of_few_do_not_meet():
    mixed = mix(np.arange(60)).tolist()
    sums = {(mixed[i] + mixed[j]) % 2**64 for i in range(60) for j in range(i)}
    assert len(sums) == 60 * 59 // 2
