"""The fault matrix of the launcher: each row injects one fault and states the expected result.

Row numbers (R1, R2, ...) are those of the project's fault table. Every run is bounded and must leave
no process behind.
"""

import os
import re
import signal
import time
from contextlib import suppress

import psutil
import pytest

from cyxjax.errors import EXIT_HANG, EXIT_INFRASTRUCTURE, EXIT_INTERRUPT, EXIT_PREEMPTED, EXIT_USER_ERROR
from cyxjax.launch.save_request import ONE_REQUEST_S
from tests.support.launching import launch, start, under_way, until

pytestmark = pytest.mark.multiprocess

KILLED, BUG, HANG = EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, ("--hang-timeout", "3,compile=60")
# fault of rank 1 in step 3, kind, exit code, part of first_error.json, pattern of the output
FAILURES = {
    "R4 in a thread": (
        "thread",
        "light",
        BUG,
        {"type": "KeyError"},
        "rank [02] followed: PeerLost: lost rank 1",
    ),
    "R4 sys.exit": ("exit3", "light", 3, {"type": "exit", "exit_code": 3}, ""),
    "R4 with children": ("child", "light", BUG, {"message": "left a child behind"}, ""),
    "R1 without restarts": ("kill", "light", KILLED, {"type": "SIGKILL"}, ""),
    "R6 exit 0": ("exit0", "jax", BUG, {"type": "EarlyEnd"}, ""),
    "R6 vanished": ("vanish", "light", BUG, {"type": "EarlyEnd"}, ""),
    "R7 suspended": ("stop", "light", EXIT_HANG, {"type": "Hang"}, "^  rank 1: step 3, data, suspended"),
    "R8 data": ("sleep", "jax", EXIT_HANG, {"type": "Hang"}, "^  rank 1: step 3, data, .* slow_loader"),
    "R9 GIL held": ("gil", "light", EXIT_HANG, {"type": "Hang"}, "^  rank 1: step 3, data, .* hold_the_gil"),
    "R9 endless loop": ("spin", "light", EXIT_HANG, {"type": "Hang"}, "^  rank 1: step 3, data, .* spin"),
    "R15 segmentation fault": ("segv", "light", KILLED, {"type": "SIGSEGV"}, "Segmentation fault"),
    "R15 abort": ("abort", "light", KILLED, {"type": "SIGABRT"}, ""),
    "real-time signal": ("realtime", "light", KILLED, {"type": f"signal {signal.SIGRTMIN + 3}"}, ""),
    "R16 memory": ("memory", "light", BUG, {"type": "MemoryError"}, ""),
}


@pytest.mark.parametrize(("fault", "kind", "code", "record", "message"), FAILURES.values(), ids=FAILURES)
def test_one_rank_fails_and_the_group_ends_with_its_error(tmp_path, fault, kind, code, record, message):
    flags = HANG if code == EXIT_HANG else ()
    fork = fault != "memory"  # a fork starts with more memory than the rank's limit
    run = launch(tmp_path, 3, *flags, KIND=kind, FAULT=f"{fault}:1:3", STEPS=4000, fork=fork)
    assert run.code == code, run.err
    assert {"rank": 1, **record}.items() <= run.first.items()
    assert "rank 1 failed first" in run.err
    assert re.search(message, run.err, re.MULTILINE), run.err
    assert "finished" not in run.out
    if code == EXIT_HANG:
        assert set(run.first["stacks"]) >= {"0", "2"}
        assert kind == "light" or "  rank 0: step 3, step" in run.err  # in a real collective


def test_r4_the_first_error_is_last_and_alone_and_secrets_are_not_shown(tmp_path):
    run = launch(tmp_path, 3, KIND="jax", FAULT="raise:1:3", STEPS=400, fork=True)
    assert run.code == EXIT_USER_ERROR, run.err
    expected = {"rank": 1, "type": "ValueError", "step": 3, "phase": "data", "secondary": False}
    assert expected.items() <= run.first.items()
    assert run.err.rstrip().endswith("ValueError: boom, api_key=[redacted]")
    assert run.err.count("Traceback (most recent call last)") == 1
    assert re.search(r"rank [02] followed: ", run.err)
    assert "hunter2" not in run.out + run.err + (tmp_path / "first_error.json").read_text()
    assert "raise_with_secret" in run.log(1)  # the log of the failed rank has its traceback


def test_ranks_that_were_killed_or_hang_are_started_again(tmp_path):
    faults = "kill:1:2 kill:0:3 kill:0+2:4 stop:1:5"  # R1, R2, R3, R7: one in each start
    run = launch(tmp_path, 3, "--max-restarts", "4", *HANG, KIND="jax", FAULT=faults, fork=True)
    assert run.code == 0, run.err
    assert run.out.count("finished 8 steps, start 4, total 3") == 3
    assert re.findall(r"restart \d of 4", run.err) == [f"restart {number} of 4" for number in range(1, 5)]


@pytest.mark.parametrize(
    ("fault", "code", "shown", "message"),
    [
        ("raise:all:2", EXIT_USER_ERROR, 2, "the same error at step 2 again"),  # R5: once per start
        ("kill:all:2", EXIT_INFRASTRUCTURE, 0, "3 restarts came no further than step 2"),  # R38
    ],
)
def test_a_fault_that_comes_again_and_again_is_given_up(tmp_path, fault, code, shown, message):
    env = {"FAULT": fault, "FAULT_STARTS": 99, "STEP_S": 0.01}
    run = launch(tmp_path, 2, "--max-restarts", "9", KIND="light", fork=True, **env)
    assert run.code == code, run.err
    assert run.err.count("Traceback") == shown
    assert message in run.err


def test_r10_a_slow_rank_is_named_and_left_alone(tmp_path):
    env = {"SLOW_RANK": 1, "STEPS": 4000, "UNTIL": tmp_path / "named"}
    run = start(tmp_path, 2, "--hang-timeout", "5", KIND="jax", fork=True, **env)
    assert run.logged("rank 1 is slow")
    (tmp_path / "named").touch()
    assert run.wait().code == 0, run.err
    assert "restart" not in run.err


# signal to the launcher, kind, what the ranks do, flags, exit code, output
STOPS = {
    "R11": (signal.SIGTERM, "light", "save", (), EXIT_PREEMPTED, "SIGTERM: the ranks have 30 s"),
    "R11 under jax": (signal.SIGTERM, "jax", "save", (), EXIT_PREEMPTED, "SIGTERM: the ranks have 30 s"),
    "R11 no room": (signal.SIGTERM, "light", "fail to save", (), EXIT_USER_ERROR, "CheckpointError: no room"),
    "R11 bug": (signal.SIGTERM, "light", "raise", (), EXIT_USER_ERROR, "KeyError: 'export'"),
    "R12": (signal.SIGTERM, "light", "ignore", ("--grace", "1"), EXIT_PREEMPTED, "killed after 1 s"),
    "R13": (signal.SIGINT, "light", "end", (), EXIT_INTERRUPT, "SIGINT: the ranks have 30 s"),
    "hangup": (signal.SIGHUP, "light", "save", (), EXIT_PREEMPTED, "SIGHUP: the ranks have 30 s"),
}


@pytest.mark.parametrize(("number", "kind", "on_term", "flags", "code", "message"), STOPS.values(), ids=STOPS)
def test_a_signal_to_the_launcher_stops_the_ranks(tmp_path, number, kind, on_term, flags, code, message):
    run = under_way(tmp_path, 2, *flags, KIND=kind, ON_TERM=on_term, fork=True)
    run.process.send_signal(number)
    assert (run.wait().code, run.survivors()) == (code, []), run.err
    assert message in run.err
    assert run.err.count("Traceback") == (on_term == "raise")
    assert run.out.count("saved") == (2 if on_term == "save" else 0)


def test_r12_a_second_sigterm_ends_the_patience(tmp_path):
    run = under_way(tmp_path, 2, "--grace", "300", ON_TERM="ignore", fork=True)
    run.process.send_signal(signal.SIGTERM)
    assert run.logged("the ranks have 300 s to stop")
    asked_s = time.monotonic()
    for _ in range(3):  # the same request again
        run.process.send_signal(signal.SIGTERM)
    assert not until(lambda: run.process.poll() is not None, 0.9 * ONE_REQUEST_S)
    time.sleep(max(0.0, asked_s + 1.1 * ONE_REQUEST_S - time.monotonic()))
    run.process.send_signal(signal.SIGTERM)
    assert (run.wait().code, run.survivors()) == (EXIT_PREEMPTED, [])
    assert "300 s and" not in run.err
    assert "killed at the second signal" in run.err


@pytest.mark.parametrize(
    ("number", "to", "code"),
    [
        (signal.SIGTERM, "one rank", EXIT_PREEMPTED),
        (signal.SIGINT, "one rank", EXIT_INTERRUPT),
        (signal.SIGTERM, "all ranks, then the launcher", EXIT_PREEMPTED),
    ],
)
def test_r11_a_rank_that_a_signal_asks_to_stop_has_not_failed(tmp_path, number, to, code):
    run = under_way(tmp_path, 2, "--max-restarts", "3", fork=True)  # no handler, as during a start
    pids = run.survivors()
    for pid in pids[:1] if to == "one rank" else pids:
        with suppress(ProcessLookupError):  # it has ended with the first one
            os.kill(pid, number)
    if to != "one rank":
        time.sleep(0.1)
        run.process.send_signal(number)
    assert (run.wait().code, run.survivors(), run.first) == (code, [], {})
    assert "Traceback" not in run.err
    assert "restart" not in run.err


def test_r37_a_noisy_rank_stalls_nobody_and_memory_stays_flat(tmp_path):
    run = start(tmp_path, 2, "--redirects", "3", KIND="light", FAULT="noise:1:1", STEPS=3)
    assert run.reached("under way", rank=0)
    peak_bytes, launcher = 0, psutil.Process(run.process.pid)
    while run.process.poll() is None:
        with suppress(psutil.Error):
            peak_bytes = max(peak_bytes, launcher.memory_info().rss)
        time.sleep(0.05)
    assert run.wait().code == 0, run.err
    assert peak_bytes < 200_000_000
    shown = run.log(1)
    assert (shown.count("x" * 1023), shown.count("#")) == (100 * 1024, 3_000_000)
