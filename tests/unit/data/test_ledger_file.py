"""A ledger that was torn or damaged ends at the checkpoint again, and what is written again is proved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyxjax.data.ledger import Tally, audit, walk
from cyxjax.data.ledger_file import cut_back, line, read_ledger
from cyxjax.errors import DataError
from tests.unit.data.test_ledger import CUTS, FACTS, run

PLACES = [(0, 8), (0, 20), (1, 0), (1, 4), (1, 12), (2, 0), (2, 16), (3, 0)]  # after each of the spans


def tallies(records):
    return [one.after for one in walk(records)]


def write(path, records, facts=FACTS):
    path.write_text(line(facts._asdict()) + "".join(line(one.span.to_json()) for one in records))
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


MADE = run(*CUTS)
ENDS = tallies(MADE)


def test_spans_after_the_checkpoint_are_taken_back(path):
    whole = write(path, MADE[:5])
    with path.open("ab") as file:
        file.write(b"".join(line(one.span.to_json()).encode() for one in MADE[5:7]) + b'{"steps": 13, "sa')
    cut = cut_back(path, ENDS[4], PLACES[4], FACTS)
    assert (cut.taken_back, cut.made_again, cut.missing) == (7, 0, 0)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("torn", [b"", b'{"steps": 8, "samp', b"\0" * 512, b'{"a"\n', b"[" * 9000 + b"\n"])
def test_what_is_shorter_than_the_checkpoint_is_written_again_and_proved(path, torn):
    write(path, MADE[:2])
    with path.open("ab") as file:
        file.write(torn)
    cut = cut_back(path, ENDS[-1], PLACES[-1], FACTS)
    assert (cut.made_again, cut.missing) == (13, 0)
    kept = read_ledger(path)
    assert audit(kept.records) == []
    assert tallies(kept.records)[-1] == ENDS[-1]


@pytest.mark.parametrize("field", ["sum", "samples"])
def test_a_value_damaged_in_the_middle_is_mended(path, field):
    write(path, MADE)
    lines = path.read_text().splitlines()
    old = f'"{field}": '
    at = lines[4].index(old) + len(old) + (field == "sum")
    lines[4] = lines[4][:at] + ("7" if lines[4][at] != "7" else "6") + lines[4][at + 1 :]
    path.write_text("\n".join(lines) + "\n")
    assert cut_back(path, ENDS[-1], PLACES[-1], FACTS).made_again
    kept = read_ledger(path)
    assert audit(kept.records) == []
    assert tallies(kept.records)[-1] == ENDS[-1]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_is_gone_or_holds_zeros_is_made_again(path, is_gone):
    whole = write(path, MADE)
    if is_gone:
        path.unlink()
    else:
        path.write_bytes(whole[:300] + bytes(100) + whole[400:])
    cut = cut_back(path, ENDS[-1], PLACES[-1], FACTS)
    assert cut.made_again
    assert not cut.missing
    assert tallies(read_ledger(path).records)[-1] == ENDS[-1]


def test_what_cannot_be_proved_is_not_written(path):
    # What was really delivered is not what the order promises: the record of it is kept as far as it goes.
    odd = run(*CUTS, change=lambda number, ids: ids[1:] if number == 5 else ids)
    write(path, odd[:4])
    cut = cut_back(path, tallies(odd)[-1], PLACES[-1], FACTS)
    assert cut.missing == ENDS[-1].steps - ENDS[3].steps
    assert [one.span for one in read_ledger(path).records] == [one.span for one in odd[:4]]


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
    cut = cut_back(path, old, PLACES[4], FACTS)  # nothing to prove it by
    assert (cut.made_again, cut.missing) == (0, ENDS[4].steps - ENDS[1].steps)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_tears_it_the_end_is_the_checkpoint_s(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "ledger.jsonl"
    whole = write(path, MADE)
    at = data.draw(st.integers(0, len(MADE) - 1))
    cut = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.sampled_from([b"", bytes(64), b"\xff\n", b'{"steps":']) | st.binary(max_size=40))
    path.write_bytes(whole[:cut] + tail)
    cut_back(path, ENDS[at], PLACES[at], FACTS)
    records = read_ledger(path).records
    assert audit(records) == []
    assert tallies(records)[-1] == ENDS[at]


def test_a_link_is_refused_and_its_target_untouched(path, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    path.symlink_to(target)
    for use in (read_ledger, lambda p: cut_back(p, ENDS[0], PLACES[0], FACTS)):
        with pytest.raises(DataError, match="is a link"):
            use(path)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    "text", ['{"steps": 1}\n', "[]\n", '{"seed": "x"}\n', '{"seed": 1}\n', "nothing\n", "[" * 9000 + "\n"]
)
def test_what_is_no_ledger_is_refused_with_its_line(path, text):
    path.write_text(text)
    with pytest.raises(DataError, match="line 1"):
        read_ledger(path)
