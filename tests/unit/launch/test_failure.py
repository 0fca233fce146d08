"""Error records: what is kept, what is hidden, which error comes first, and how a rank ends."""

import json
import os
import subprocess
import sys

import pytest

from cyxjax.errors import EXIT_CONFIG, EXIT_SECONDARY, EXIT_USER_ERROR, CheckpointError, ConfigError
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import ErrorRecord, PeerLost, is_secondary
from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.supervise.worker import Start


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


def test_a_configuration_error_has_its_own_code():
    assert raised(ConfigError("bad")).exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    "error",
    [
        ValueError("UNKNOWN: Gloo all-reduce failed: [x/pair.cc:538] Read error: Connection reset by peer"),
        RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service"),
        RuntimeError("INTERNAL: NCCL operation ncclAllReduce failed"),
        PeerLost("lost rank 1"),
    ],
)
def test_what_a_healthy_rank_gets_from_a_failing_one(error):
    record = raised(error)
    assert record.secondary
    assert record.exit_code == EXIT_SECONDARY


def test_a_consequence_stays_one_when_it_is_wrapped():
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = PeerLost("x")
    assert is_secondary(wrapped)
    assert not is_secondary(ConnectionResetError("Connection reset by peer"))  # a database's, say
    assert not is_secondary(ValueError("Gloo is a word"))


def test_the_earliest_cause_comes_first_not_the_earliest_record():
    consequence = ErrorRecord(0, "PeerLost", "", secondary=True, at_monotonic_s=1.0)
    late = ErrorRecord(2, "KeyError", "", at_monotonic_s=3.0)
    cause = ErrorRecord(1, "ValueError", "", at_monotonic_s=2.0)
    assert records.first_of([consequence, late, cause]) is cause
    assert records.first_of([consequence]) is consequence
    assert records.first_of([consequence], ended_early=[3]).type == "EarlyEnd"


class Ended:
    """A rank of a start, as far as its end is concerned."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode

    def progress(self) -> Progress:
        return Progress()


def test_who_left_early_is_known_in_whatever_order_the_ends_are_noticed():
    lost = ErrorRecord(0, "PeerLost", "", secondary=True, at_monotonic_s=1.0)
    others_run = Start(0, [Ended(None), Ended(0)])
    others_run.note_clean_end(1)
    others_run.note(lost, within_s=0.0)
    others_failed = Start(0, [Ended(75), Ended(0)])
    others_failed.note(lost, within_s=0.0)
    others_failed.note_clean_end(1)
    assert others_run.ended_early == others_failed.ended_early == [1]
    assert records.first_of(others_failed.records, others_failed.ended_early).type == "EarlyEnd"


def test_who_ends_last_or_beside_an_error_has_not_left_early():
    last = Start(0, [Ended(0), Ended(0)])
    last.note_clean_end(1)
    beside = Start(0, [Ended(1), Ended(0), Ended(None)])
    beside.note(ErrorRecord(0, "KeyError", ""), within_s=0.0)
    beside.note_clean_end(1)
    assert last.ended_early == beside.ended_early == []


def test_a_cut_off_record_is_no_record(tmp_path):
    path = tmp_path / "e.json"
    path.write_text('{"rank": 1, "ty')
    assert records.load(str(path)) is None
    assert records.load(str(tmp_path / "none")) is None


def test_signals_are_named_with_their_meaning():
    record = records.of_status(1, 7, -9, Progress(3, "step"), 0)
    assert record.type == "SIGKILL"
    assert "memory" in record.message
    assert records.of_status(1, 7, 75, Progress(), 0).secondary


def test_an_error_of_ours_is_shown_as_its_line_and_filed_whole():
    ours, theirs = raised(CheckpointError("no step in x. HINT: look there")), raised(ValueError("boom"))
    assert "Traceback" in ours.traceback
    assert records.text_of(ours) == "CheckpointError: no step in x. HINT: look there\n"
    assert records.text_of(theirs) == theirs.traceback  # of a program's own error it says where


ENDING = """
import os, sys, threading
from cyxjax.launch.failure import hooks as exits
hooks = exits.install(1, 0, os.environ)
hooks.report = lambda text: print("told:", text, flush=True)
{body}
"""


def end(body, **env):
    code = ENDING.format(body=body)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_exception_ends_the_process_with_its_traceback_and_tells_the_peers():
    done = end("raise ValueError('boom')")
    assert done.returncode == 1
    assert "told: ValueError: boom" in done.stdout
    assert done.stderr.rstrip().endswith("ValueError: boom")


def test_an_exception_in_a_thread_ends_the_process_too():
    done = end("threading.Thread(target=lambda: 1 / 0).start(); threading.Event().wait(30)")
    assert done.returncode == 1
    assert "told: ZeroDivisionError" in done.stdout


def test_a_consequence_is_not_told_on():
    done = end("raise RuntimeError('UNAVAILABLE: Socket closed')")
    assert (done.returncode, done.stdout) == (EXIT_SECONDARY, "")
    assert done.stderr == "[rank 1] RuntimeError: UNAVAILABLE: Socket closed\n"


def test_sys_exit_does_not_wait_for_peers():
    done = end("import atexit; atexit.register(exits.end_if_failed, hooks); sys.exit(5)")
    assert (done.returncode, done.stdout) == (5, "told: sys.exit(5)\n")


def test_a_caught_sys_exit_is_forgotten_by_a_later_one():
    first = "import atexit; atexit.register(exits.end_if_failed, hooks)\ntry: sys.exit(5)\n"
    assert end(f"{first}except SystemExit: pass\nsys.exit(0)").returncode == 0


def test_torchrun_finds_our_traceback(tmp_path):
    path = tmp_path / "torch.json"
    end("raise ValueError('boom')", TORCHELASTIC_ERROR_FILE=str(path))
    message = json.loads(path.read_text())["message"]
    assert message["message"].startswith("ValueError: boom")
    assert "Traceback" in message["extraInfo"]["py_callstack"]


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
