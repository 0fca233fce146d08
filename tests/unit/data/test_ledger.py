"""The ledger is the same at every world size; the audit names the first wrong span and its fault.

An incomplete or damaged file is cut back to the checkpoint, and rewritten records are verified.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
from cyxjax.data.ledger_file import cut_back, line, read_ledger
from cyxjax.errors import DataError

FACTS = StreamFacts(23, 4, drop_last=False, seed=9, shuffle=True)  # 6 steps per epoch, the last has 3 samples


def held(ids):
    ids = np.asarray(ids)[None]
    return delivered(ids, np.ones(ids.shape, bool))[0]


def run(*cuts, facts=FACTS, change=lambda number, ids: ids, at=(0, 0)):
    """Records of spans that end at `cuts`, pairs (epoch, stop); change(number of span, ids) -> ids."""
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_shares_add_up_to_the_same_span(ranks):
    ids = FACTS.ids(0, 8, 20)
    total = Delivered()
    for rank in range(ranks):
        total = total.plus(held(ids[rank::ranks]))
    assert total == held(ids) == FACTS.promised(0, 8, 20)


@pytest.mark.parametrize(
    ("ids_of_span_4", "kind", "message"),
    [
        (lambda ids: ids[1:], "skipped", "7 samples"),
        (lambda ids: np.append(ids, ids[0]), "repeated", "9 samples"),
        (
            lambda ids: [*ids[:-1], ids[0]],
            "altered",
            "8 samples that are not the 8 of places 4 to 11 of epoch 2",
        ),
        (lambda ids: [], "skipped", "0 samples"),
    ],
)
def test_what_was_lost_doubled_or_taken_for_another_is_named_in_its_span(ids_of_span_4, kind, message):
    records = run(
        *CUTS, change=lambda number, ids: np.asarray(ids_of_span_4(ids), int) if number == 4 else ids
    )
    (finding,) = audit(records)
    assert (finding.step, finding.kind) == (8, kind)
    assert message in str(finding)
    assert len(audit(records * 9, max_findings=7)) == 7


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


@pytest.mark.parametrize(
    "changes", [{"global_batch_size": 5}, {"global_batch_size": 16}, {"drop_last": True}], ids=str
)
@pytest.mark.parametrize("cut", [(0, 4), (0, 20), (1, 0), (1, 12)])
def test_a_run_resumed_at_another_size_at_any_sample_is_whole(changes, cut):
    first = run(cut)
    second = run((cut[0], cut[1] + 3), (2, 0), facts=FACTS._replace(**changes), at=cut)
    assert audit(first + second + run((4, 8), at=(2, 0))) == []


@pytest.mark.parametrize(
    ("at", "kind", "message"),
    [
        # batches assumed smaller
        ((1, 2), "repeated", "place 2 of epoch 2 to before place 4 of epoch 2"),
        ((1, 8), "skipped", "place 4 of epoch 2 to before place 8 of epoch 2"),  # ... larger
        ((2, 0), "skipped", "place 4 of epoch 2 to before place 0 of epoch 3"),  # the epoch counted as over
        ((1, 0), "repeated", "place 0 of epoch 2 to before place 4 of epoch 2"),
        ((0, 8), "repeated", "place 8 of epoch 1 to before place 4 of epoch 2"),
        ((3, 0), "skipped", "place 4 of epoch 2 to before place 0 of epoch 4"),
    ],
)
def test_a_resume_at_another_size_from_the_wrong_sample_is_found(at, kind, message):
    found = audit(run((1, 4)) + run((4, 8), facts=FACTS._replace(global_batch_size=5), at=at))
    assert any((f.step, f.kind) == (8, kind) and message in f.text for f in found), found


def test_an_order_changed_within_an_epoch_is_found():
    first = run((1, 8))
    (finding,) = audit(first + run((2, 0), facts=FACTS._replace(seed=1), at=(1, 8)))
    assert (finding.kind, "seed is 1, was 9" in finding.text) == ("reordered", True)
    assert audit(run((1, 0)) + run((1, 12), facts=FACTS._replace(seed=1), at=(1, 0))) == []
    fewer = FACTS._replace(num_samples=6)  # after 8 of 23 samples, it has none left in the epoch
    (finding,) = audit(first + run((3, 0), facts=fewer, at=(2, 0)))
    assert (finding.kind, "num_samples is 6, was 23" in finding.text) == ("reordered", True)


OLD = {"steps": 2, "samples": 8, "epoch": 0, "last": [4, "0" * 16, "1" * 16], "digest": "0" * 64}


def test_a_step_of_0_2_0_is_a_span_and_its_checkpoint_is_known_by_its_counts():
    found = Delivered(4, int("1" * 16, 16))
    assert span_of_step(OLD | {"first": 8}) == Span(0, 8, 12, 1, found)
    tally = Tally.from_json(OLD)
    assert tally == Tally(2, 8, None)
    assert tally.same(Tally(2, 8, 77))
    assert not tally.same(Tally(2, 7, 77))
    assert not Tally(2, 8, 76).same(Tally(2, 8, 77))


# ---- the file ---------------------------------------------------------------------------------------------

PLACES = [(0, 8), (0, 20), (1, 0), (1, 4), (1, 12), (2, 0), (2, 16), (3, 0)]  # after each of the spans


def tallies(records):
    return [one.after for one in walk(records)]


def text_of(records, facts=FACTS):
    return (line(facts._asdict()) + "".join(line(one.span.to_json()) for one in records)).encode()


def write(path, records, facts=FACTS):
    path.write_bytes(text_of(records, facts))
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


MADE = run(*CUTS)
ENDS = tallies(MADE)
WHOLE = text_of(MADE)
CHANGES = [(b'"samples": 12,', b'"samples": 13,'), (b'"sum": "', b'"sum": "-')]


def test_spans_after_the_checkpoint_are_taken_back(path):
    whole = write(path, MADE[:5])
    with path.open("ab") as file:
        file.write(b"".join(line(one.span.to_json()).encode() for one in MADE[5:7]) + b'{"steps": 13, "sa')
    cut = cut_back(path, ENDS[4], PLACES[4], FACTS)
    assert (cut.taken_back, cut.made_again, cut.missing) == (7, 0, 0)
    assert path.read_bytes() == whole


def test_what_cannot_be_proved_is_not_written(path):
    # The delivered samples differ from the order: their records are kept as far as they go.
    shorter = run(*CUTS, change=lambda number, ids: ids[1:] if number == 5 else ids)
    write(path, shorter[:4])
    cut = cut_back(path, tallies(shorter)[-1], PLACES[-1], FACTS)
    assert cut.missing == ENDS[-1].steps - ENDS[3].steps
    assert [one.span for one in read_ledger(path).records] == [one.span for one in shorter[:4]]


def test_the_ledger_of_another_run_is_kept_aside(path):
    other = write(path, run(*CUTS, facts=FACTS._replace(seed=1)), FACTS._replace(seed=1))
    assert cut_back(path, ENDS[3], PLACES[3], FACTS).made_again == ENDS[3].steps
    assert audit(read_ledger(path).records) == []
    assert path.with_name("ledger.jsonl.old").read_bytes() == other


def test_a_checkpoint_of_0_2_0_knows_no_sum_and_takes_it_from_the_file(path):
    whole = write(path, MADE)
    old = Tally(ENDS[4].steps, ENDS[4].samples, None)
    assert cut_back(path, old, PLACES[4], FACTS).total == ENDS[4].total
    assert whole.startswith(path.read_bytes())
    write(path, MADE[:2])
    cut = cut_back(path, old, PLACES[4], FACTS)  # nothing to verify it with
    assert (cut.made_again, cut.missing) == (0, ENDS[4].steps - ENDS[1].steps)


TAILS = [b"", bytes(512), b"\xff\n", b'{"steps":', b'{"a"\n', b"[" * 9000 + b"\n"]


@given(
    damaged=st.sampled_from([WHOLE.replace(*change, 1) for change in CHANGES])
    | st.builds(
        lambda cut, tail, gap: WHOLE[:cut] + tail + WHOLE[cut + gap :],
        st.integers(0, len(WHOLE)),
        st.sampled_from(TAILS) | st.binary(max_size=40),
        st.integers(1, len(WHOLE)),
    ),
    at=st.integers(0, len(MADE) - 1),
)
@example(damaged=b"", at=len(MADE) - 1)
@example(damaged=WHOLE[:300] + bytes(100) + WHOLE[400:], at=len(MADE) - 1)
@example(damaged=WHOLE.replace(*CHANGES[0], 1), at=len(MADE) - 1)
@example(damaged=WHOLE.replace(*CHANGES[1], 1), at=len(MADE) - 1)
@settings(max_examples=150, deadline=None)
def test_whatever_tears_or_changes_it_the_end_is_the_checkpoint_s(tmp_path_factory, damaged, at):
    path = tmp_path_factory.mktemp("torn") / "ledger.jsonl"
    path.write_bytes(damaged)
    assert cut_back(path, ENDS[at], PLACES[at], FACTS).missing == 0
    records = read_ledger(path).records
    assert audit(records) == []
    assert tallies(records)[-1] == ENDS[at]


HEAD, SPAN, STEP = FACTS._asdict(), MADE[0].span.to_json(), OLD | {"first": 8}
NO_SPANS = [
    *({"steps": -1}, {"steps": "1"}, {"steps": 0}, {"stop": 0}, {"samples": True}, {"epoch": None}),
    *({"sum": "x"}, {"sum": 3}, {"x": 1}),
]


@pytest.mark.parametrize(
    "lines",
    [
        ['{"steps": 1}\n'],
        ["[]\n"],
        ['{"seed": "x"}\n'],
        ['{"seed": 1}\n'],
        ["nothing\n"],
        ["[" * 9000 + "\n"],
        [line(HEAD | {"global_batch_size": 0})],
        [line(HEAD | {"seed": float("inf")})],
        *([line(HEAD), line(SPAN | change)] for change in NO_SPANS),
        *([line(HEAD), line(STEP | change)] for change in ({"last": [1]}, {"first": -1}, {"epoch": None})),
    ],
    ids=range(8 + len(NO_SPANS) + 3),
)
def test_what_is_no_ledger_is_refused_with_its_line(path, lines):
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=f"line {len(lines)} "):
        read_ledger(path)
