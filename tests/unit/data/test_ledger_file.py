"""A ledger that a power cut tore ends at the checkpoint again, and what is written again is proved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyxjax.data import ledger_file
from cyxjax.data.audit import audit
from cyxjax.data.ledger import Ledger, StreamFacts, expected_step
from cyxjax.data.ledger_file import Cut, cut_back, line, read_entries
from cyxjax.errors import DataError

FACTS = StreamFacts(23, 4, drop_last=False, seed=9, shuffle=True)  # 6 steps an epoch, the last of 3 samples


def ledgers(num_steps, facts=FACTS, placed=True):
    made, epoch, first = [Ledger()], 0, 0
    for _ in range(num_steps):
        if not facts.plan(first).num_steps:
            epoch, first = epoch + 1, 0
        made.append(expected_step(facts, made[-1], epoch, first, placed))
        first = facts.plan(first).stop(0)
    return made[1:]


def write(path, made, facts=FACTS):
    path.write_text(line(facts._asdict()) + "".join(line(ledger.to_json()) for ledger in made))
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_what_is_longer_than_the_checkpoint_is_taken_back(path):
    made = ledgers(15)
    whole = write(path, made[:9])
    with path.open("ab") as file:
        file.write(b"".join(line(ledger.to_json()).encode() for ledger in made[9:12]) + b'{"steps": 13, "sa')
    assert cut_back(path, made[8], FACTS) == Cut(taken_back=3)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("placed", [True, False], ids=["", "of_before_places"])
@pytest.mark.parametrize("torn", [b"", b'{"steps": 8, "samp', b"\0" * 512, b'{"a"\n', b"[" * 9000 + b"\n"])
def test_what_is_shorter_than_the_checkpoint_is_written_again_and_proved(path, torn, placed):
    made = ledgers(12, placed=placed)
    whole = write(path, made)
    write(path, made[:7])
    with path.open("ab") as file:
        file.write(torn)
    assert cut_back(path, made[-1], FACTS) == Cut(made_again=5, torn=bool(torn))
    assert path.read_bytes() == whole
    assert audit(read_entries(path)) == []


def test_zeros_in_the_middle_are_no_reason_to_lose_the_rest(path):
    made = ledgers(12)
    whole = write(path, made)
    path.write_bytes(whole[:500] + bytes(100) + whole[600:])
    cut = cut_back(path, made[-1], FACTS)
    assert (cut.torn, cut.missing) == (True, 0)
    assert path.read_bytes() == whole


def test_a_file_that_is_gone_is_made_again(path):
    made = ledgers(12)
    whole = write(path, made)
    path.unlink()
    assert cut_back(path, made[-1], FACTS) == Cut(made_again=12)
    assert path.read_bytes() == whole


def test_what_cannot_be_proved_is_not_written(path):
    # The checkpoint is of a run with another batch size; nothing in the file or now says which.
    made = ledgers(12, FACTS._replace(global_batch_size=3))
    write(path, ledgers(4))
    assert cut_back(path, made[-1], FACTS) == Cut(missing=8)
    assert len(read_entries(path)) == 4


def test_the_ledger_of_another_run_is_kept_aside(path):
    other = write(path, ledgers(12, FACTS._replace(seed=1)))
    made = ledgers(5)
    assert cut_back(path, made[-1], FACTS) == Cut(made_again=5)
    assert audit(read_entries(path)) == []
    assert path.with_name("ledger.jsonl.old").read_bytes() == other


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_tears_it_the_end_is_the_checkpoint_s(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "ledger.jsonl"
    made = ledgers(14)
    whole = write(path, made)
    at = data.draw(st.integers(0, 9))
    cut = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.sampled_from([b"", bytes(64), b"\xff\n", b'{"steps":']) | st.binary(max_size=40))
    path.write_bytes(whole[:cut] + tail)
    cut_back(path, made[at], FACTS)
    entries = read_entries(path)
    assert audit(entries) == []
    assert entries[-1].ledger == made[at]


def test_a_link_is_refused_and_its_target_untouched(path, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    path.symlink_to(target)
    for use in (ledger_file.refuse_link, read_entries, lambda p: cut_back(p, ledgers(1)[0], FACTS)):
        with pytest.raises(DataError, match="is a link"):
            use(path)
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    "text", ['{"steps": 1}\n', "[]\n", '{"seed": "x"}\n', '{"seed": 1}\n', "nothing\n", "[" * 9000 + "\n"]
)
def test_what_is_no_ledger_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(DataError):
        read_entries(path)
