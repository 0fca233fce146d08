"""Error records: what they contain and hide, which error is the first, and how a rank ends."""

import os
from types import SimpleNamespace

import pytest

from cyxjax.errors import EXIT_CONFIG, EXIT_SECONDARY, EXIT_USER_ERROR, ConfigError
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import ErrorRecord, PeerLost, is_secondary
from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.supervise.worker import Start
from tests.support.programs import fresh


def raised(error):
    try:
        raise error
    except BaseException as caught:  # any kind is recorded
        return records.of_exception(caught, rank=2, progress=Progress(7, "data"), start=1)


def test_a_record_holds_what_a_person_asks_for(tmp_path):
    record = raised(ValueError("no such shard"))
    assert (record.rank, record.step, record.phase, record.start) == (2, 7, "data", 1)
    assert (record.exit_code, record.secondary) == (EXIT_USER_ERROR, False)
    assert record.source.startswith("test_failure.py:")
    assert record.summary.startswith("ValueError: no such shard (test_failure.py:")
    path = str(tmp_path / "e.json")
    records.save(record, path)
    assert records.load(path) == record
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad"), EXIT_CONFIG),
        (ConnectionResetError("Connection reset by peer"), EXIT_USER_ERROR),  # of a database, for example
        (ValueError("Gloo is a word"), EXIT_USER_ERROR),
        # in a healthy rank because of a failing one
        (
            ValueError(
                "UNKNOWN: Gloo all-reduce failed: [x/pair.cc:538] Read error: Connection reset by peer"
            ),
            EXIT_SECONDARY,
        ),
        (RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service"), EXIT_SECONDARY),
        (RuntimeError("INTERNAL: NCCL operation ncclAllReduce failed"), EXIT_SECONDARY),
        (PeerLost("lost rank 1"), EXIT_SECONDARY),
    ],
)
def test_a_consequence_is_told_from_a_cause_also_when_it_is_wrapped(error, code):
    assert raised(error).exit_code == code
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = error
    assert is_secondary(wrapped) == raised(error).secondary == (code == EXIT_SECONDARY)


def test_the_earliest_cause_comes_first_not_the_earliest_record():
    consequence = ErrorRecord(0, "PeerLost", "", secondary=True, at_monotonic_s=1.0)
    late = ErrorRecord(2, "KeyError", "", at_monotonic_s=3.0)
    cause = ErrorRecord(1, "ValueError", "", at_monotonic_s=2.0)
    assert records.first_of([consequence, late, cause]) is cause
    assert records.first_of([consequence]) is consequence
    assert records.first_of([consequence], ended_early=[3]).type == "EarlyEnd"
    assert records.of_status(1, 7, EXIT_SECONDARY, Progress(), 0).secondary  # it left no record


def test_in_a_folder_that_hosts_share_a_consequence_takes_no_cause_s_place(tmp_path):
    cause, consequence = (ErrorRecord(rank, "E", "", secondary=bool(rank)) for rank in range(2))
    path = records.save_first(consequence, str(tmp_path))
    assert records.load(path) == consequence
    assert os.stat(path).st_mode & 0o077 == 0
    records.save_first(cause, str(tmp_path))
    assert records.save_first(consequence, str(tmp_path)) == path
    assert records.load(path) == cause


@pytest.mark.parametrize(
    ("codes", "before", "early"),
    [
        ([None, 0], None, [1]),
        ([75, 0], ErrorRecord(0, "PeerLost", "", secondary=True), [1]),  # it ended, which is noticed later
        ([0, 0], None, []),  # the last one
        ([1, 0, None], ErrorRecord(0, "KeyError", ""), []),
    ],
)
def test_who_left_early_is_known_in_whatever_order_the_ends_are_noticed(codes, before, early):
    # ranks, as far as their end is concerned
    start = Start(0, [SimpleNamespace(returncode=code, progress=Progress) for code in codes])
    if before is not None:
        start.note(before, within_s=0.0)
    start.note_clean_end(1)
    assert start.ended_early == early


def test_a_record_that_cannot_be_read_is_no_record(tmp_path):
    path = tmp_path / "e.json"
    path.write_text('{"rank": 1, "ty')
    assert records.load(str(path)) is None
    assert records.load(str(tmp_path / "none")) is records.load(str(tmp_path)) is None


ENDING = """
import os, sys, threading
from cyxjax.launch.failure import hooks as exits
hooks = exits.install(1, 0, os.environ)
hooks.report = lambda text: print("told:", text, flush=True)
{body}
"""


AT_EXIT = "import atexit; atexit.register(exits.end_if_failed, hooks)"


def end(body):
    return fresh("-c", ENDING.format(body=body), timeout=60)


@pytest.mark.parametrize(
    ("body", "code", "printed", "shown"),
    [
        (
            "raise ValueError('boom')",
            1,
            "told: ValueError: boom (<string>:6 <module>)\n",
            "ValueError: boom\n",
        ),
        (
            "threading.Thread(target=lambda: 1 / 0).start(); threading.Event().wait(30)",
            1,
            "told: ZeroDivisionError: division by zero (<string>:6 <lambda>)\n",
            "ZeroDivisionError: division by zero\n",
        ),
        # also an error that cannot be shown
        (
            "class Mute(Exception):\n    def __str__(self): return self.missing\nraise Mute",
            1,
            "told: Mute: <Mute.__str__ failed> (<string>:8 <module>)\n",
            "Mute: <exception str() failed>\n",
        ),
        # a consequence is not passed on
        (
            "raise RuntimeError('UNAVAILABLE: Socket closed')",
            EXIT_SECONDARY,
            "",
            "[rank 1] RuntimeError: UNAVAILABLE: Socket closed\n",
        ),
        # does not wait for peers
        (f"{AT_EXIT}; sys.exit(5)", 5, "told: sys.exit(5)\n", ""),
        # in a thread it ends only that thread
        (f"{AT_EXIT}; t = threading.Thread(target=sys.exit, args=[5]); t.start(); t.join()", 0, "", ""),
        # a later error replaces one that was caught
        (f"{AT_EXIT}\ntry: sys.exit(5)\nexcept SystemExit: pass\nsys.exit(0)", 0, "", ""),
    ],
)
def test_a_rank_ends_at_once_and_tells_the_peers_why(body, code, printed, shown):
    done = end(body)
    assert (done.returncode, done.stdout) == (code, printed)
    assert done.stderr.endswith(shown)


# a rank in a group, whose exit handler is the one that `init` registers; it outlives its child and goes on
FORKED = """
import atexit
from types import SimpleNamespace
from cyxjax.launch import connect
left = SimpleNamespace(wait_until_all_are_done=lambda s: print("left the group", flush=True), leave=lambda: 0)
connect._connection = connect.Connection(left, hooks)
atexit.register(connect.disconnect)
if os.fork() == 0:
    {child}
print("child ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
atexit.unregister(connect.disconnect)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(
    ("child", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit(0)", 0),
        ("raise ValueError('boom')", 1),
        ("t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); sys.exit(0)", 0),
    ],
)
def test_the_end_of_a_forked_child_is_not_the_rank_s(child, code):
    done = end(FORKED.format(child=child))
    assert (done.returncode, done.stdout) == (0, f"child ended with {code}\n")
