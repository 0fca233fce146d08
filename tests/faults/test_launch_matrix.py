"""The fault matrix of the launcher: each row injects one fault and holds what must follow.

Row numbers (R1, R2, ...) are those of the project's fault table. Every run is bounded and must leave
no process behind.
"""

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest

from cyxjax.errors import EXIT_HANG, EXIT_INFRASTRUCTURE, EXIT_INTERRUPT, EXIT_PREEMPTED, EXIT_USER_ERROR
from cyxjax.launch.save_request import ONE_REQUEST_S
from tests.support.launching import launch, start, until

pytestmark = pytest.mark.multiprocess

KILLED, BUG = EXIT_INFRASTRUCTURE, EXIT_USER_ERROR
# row, fault, kind, exit code, what first_error.json says of rank 1
DEATHS = [
    ("R4", "raise", "jax", BUG, {"type": "ValueError", "step": 3, "phase": "data", "secondary": False}),
    ("R4 in a thread", "thread", "light", BUG, {"type": "KeyError"}),
    ("R4 sys.exit", "exit3", "jax", 3, {"type": "exit", "exit_code": 3}),
    ("R4 with children", "child", "light", BUG, {"message": "left a child behind"}),
    ("R1 without restarts", "kill", "light", KILLED, {"type": "SIGKILL"}),
    ("R15 segmentation fault", "segv", "light", KILLED, {"type": "SIGSEGV"}),
    ("R15 abort", "abort", "light", KILLED, {"type": "SIGABRT"}),
    ("R16 memory", "memory", "light", BUG, {"type": "MemoryError"}),
]


@pytest.mark.parametrize(("row", "fault", "kind", "code", "record"), DEATHS, ids=[row[0] for row in DEATHS])
def test_one_rank_dies_and_the_group_ends_with_its_error(tmp_path, row, fault, kind, code, record):
    fork = fault != "memory"  # a fork has more than that rank may have
    run = launch(tmp_path, 3, KIND=kind, FAULT=f"{fault}:1:3", STEPS=400, fork=fork)
    assert run.code == code, run.err
    assert {"rank": 1, **record}.items() <= run.first.items()
    assert "rank 1 failed first" in run.err
    assert "finished" not in run.out


def test_r4_the_first_error_is_last_and_alone_and_secrets_are_not_shown(tmp_path):
    run = launch(tmp_path, 3, KIND="light", FAULT="raise:1:3", STEPS=400)
    assert run.err.rstrip().endswith("ValueError: boom, api_key=[redacted]")
    assert run.err.count("Traceback (most recent call last)") == 1
    assert any(f"rank {other} followed: PeerLost: lost rank 1" in run.err for other in (0, 2))
    assert "hunter2" not in run.out + run.err + (tmp_path / "first_error.json").read_text()
    assert "raise_with_secret" in run.log(1)  # the log of the rank that failed holds its traceback


def test_r15_a_segmentation_fault_leaves_its_last_words(tmp_path):
    run = launch(tmp_path, 2, KIND="light", FAULT="segv:1:1", STEPS=400)
    assert any("Segmentation fault" in line for line in run.first["stderr_tail"])


@pytest.mark.parametrize(("row", "ranks"), [("R1", "1"), ("R2", "0"), ("R3", "0+2")])
def test_killed_ranks_are_started_again(tmp_path, row, ranks):
    run = launch(tmp_path, 3, "--max-restarts", "2", KIND="jax", FAULT=f"kill:{ranks}:3", fork=True)
    assert run.code == 0, run.err
    assert run.out.count("finished 8 steps, start 1, total 3") == 3
    assert "restart 1 of 2" in run.err


def test_r5_an_error_on_all_ranks_is_shown_once_and_tried_twice(tmp_path):
    fault = {"FAULT": "raise:all:2", "FAULT_STARTS": 9}
    run = launch(tmp_path, 2, "--max-restarts", "5", KIND="light", fork=True, **fault)
    assert run.code == EXIT_USER_ERROR
    assert run.err.count("Traceback") == 2  # once a start
    assert "the same error at step 2 again" in run.err


@pytest.mark.parametrize("fault", ["exit0", "vanish"])
def test_r6_a_rank_that_ends_early_is_named(tmp_path, fault):
    run = launch(tmp_path, 3, KIND="jax", FAULT=f"{fault}:1:3", STEPS=400, fork=True)
    assert run.code == EXIT_USER_ERROR, run.err
    assert run.first["rank"] == 1
    assert run.first["type"] == "EarlyEnd"


HANGS = [("R7 suspended", "stop", "suspended"), ("R8 data", "sleep", "slow_loader")]
HANGS += [("R9 GIL held", "gil", "hold_the_gil"), ("R9 endless loop", "spin", "spin")]


@pytest.mark.parametrize(("row", "fault", "seen"), HANGS, ids=[row[0] for row in HANGS])
def test_a_hang_is_ended_and_says_who_is_where(tmp_path, row, fault, seen):
    flags = ("--hang-timeout", "2,compile=30")
    run = launch(tmp_path, 3, *flags, KIND="light", FAULT=f"{fault}:1:3", STEPS=4000, fork=True)
    assert run.code == EXIT_HANG, run.err
    assert (run.first["type"], run.first["rank"]) == ("Hang", 1)
    line = next(line for line in run.err.splitlines() if line.startswith("  rank 1: step 3, data"))
    assert seen in line
    assert set(run.first["stacks"]) >= {"0", "2"}


def test_r8_in_a_real_collective_the_others_are_not_blamed(tmp_path):
    flags = ("--hang-timeout", "3,compile=60")
    run = launch(tmp_path, 2, *flags, KIND="jax", FAULT="sleep:0:3", fork=True)
    assert run.code == EXIT_HANG, run.err
    assert run.first["rank"] == 0
    assert "rank 1: step 3, step" in run.err


def test_r7_a_hang_is_restarted_like_a_death(tmp_path):
    flags = ("--hang-timeout", "2,compile=30", "--max-restarts", "1")
    run = launch(tmp_path, 2, *flags, KIND="light", FAULT="stop:1:3", fork=True)
    assert run.code == 0, run.err
    assert run.out.count("start 1") == 2


def test_r10_a_slow_rank_is_named_and_left_alone(tmp_path):
    env = {"SLOW_RANK": 1, "STEPS": 4000, "UNTIL": tmp_path / "named"}
    run = start(tmp_path, 2, "--hang-timeout", "5", KIND="jax", fork=True, **env)
    assert run.told("rank 1 is slow")
    (tmp_path / "named").touch()
    run.wait()
    assert run.code == 0, run.err
    assert "restart" not in run.err


@pytest.mark.parametrize(
    ("row", "kind", "on_term", "flags", "code", "said"),
    [
        ("R11", "light", "save", (), EXIT_PREEMPTED, "SIGTERM: the ranks have 30 s"),
        ("R11 under jax", "jax", "save", (), EXIT_PREEMPTED, "SIGTERM: the ranks have 30 s"),
        ("R12", "light", "ignore", ("--grace", "1"), EXIT_PREEMPTED, "killed after 1 s"),
        ("R11, no room", "light", "fail to save", (), EXIT_USER_ERROR, "CheckpointError: no room"),
    ],
)
def test_sigterm_to_the_launcher(tmp_path, row, kind, on_term, flags, code, said):
    run = start(tmp_path, 2, *flags, KIND=kind, ON_TERM=on_term, STEPS=4000, fork=True)
    assert run.reached("under way", 0)
    assert run.reached("under way", 1)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert (run.code, run.survivors()) == (code, [])
    assert said in run.err
    assert run.out.count("saved") == (2 if on_term == "save" else 0)


def test_r12_a_second_sigterm_ends_the_patience(tmp_path):
    run = start(tmp_path, 2, "--grace", "300", KIND="light", ON_TERM="ignore", STEPS=4000)
    assert run.reached("under way", 0)
    assert run.reached("under way", 1)
    run.process.send_signal(signal.SIGTERM)
    assert run.told("the ranks have 300 s to stop")
    asked_s = time.monotonic()
    for _ in range(3):  # of the same request
        run.process.send_signal(signal.SIGTERM)
    assert not until(lambda: run.process.poll() is not None, 0.9 * ONE_REQUEST_S)
    time.sleep(max(0.0, asked_s + 1.1 * ONE_REQUEST_S - time.monotonic()))
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    assert (run.code, run.survivors()) == (EXIT_PREEMPTED, [])
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
    run = start(tmp_path, 2, "--max-restarts", "3", KIND="light", STEPS=4000)  # no handler: as in a start
    assert run.reached("under way", 0)
    assert run.reached("under way", 1)
    pids = run.survivors()
    for pid in pids[:1] if to == "one rank" else pids:
        with suppress(ProcessLookupError):  # the first one's end has ended it
            os.kill(pid, number)
    if to != "one rank":
        time.sleep(0.1)
        run.process.send_signal(number)
    run.wait()
    assert (run.code, run.survivors(), run.first) == (code, [], {})
    assert "Traceback" not in run.err
    assert "restart" not in run.err


def test_r13_ctrl_c_leaves_nothing(tmp_path):
    run = start(tmp_path, 3, KIND="light", STEPS=4000)
    assert all(run.reached("under way", rank) for rank in range(3))
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert (run.code, run.survivors()) == (EXIT_INTERRUPT, [])


def test_r14_a_killed_launcher_leaves_no_orphans_nor_their_children(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "time.sleep(1000)\n"
    )
    run = start(tmp_path, 2, script=tmp_path / "parent.py")
    assert until(lambda: len(run.survivors()) >= 4, 90)
    run.process.kill()
    assert run.no_survivors_within(30)
    run.wait()


def test_r37_a_noisy_rank_stalls_nobody_and_memory_stays_flat(tmp_path):
    flags = ("--redirects", "3")
    run = start(tmp_path, 2, *flags, KIND="light", FAULT="noise:1:1", STEPS=3, FAULT_STARTS=1)
    peak_bytes, launcher = 0, psutil.Process(run.process.pid)
    while run.process.poll() is None:
        with suppress(psutil.Error):
            peak_bytes = max(peak_bytes, launcher.memory_info().rss)
        time.sleep(0.05)
    run.wait()
    assert run.code == 0, run.err
    assert peak_bytes < 200_000_000
    assert (tmp_path / "start_0" / "rank_1.log").stat().st_size > 100 * 2**20


def test_r37_a_line_without_end_is_shown_in_pieces(tmp_path):
    run = launch(tmp_path, 1, KIND="light", FAULT="noline:0:1", STEPS=3)
    assert run.code == 0, run.err
    assert run.out.count("#") == 3_000_000


def test_r38_a_crash_loop_is_given_up(tmp_path):
    fault = {"FAULT": "kill:0:2", "FAULT_STARTS": 99, "STEP_S": 0.01}
    run = launch(tmp_path, 1, "--max-restarts", "9", KIND="light", fork=True, **fault)
    assert run.code == EXIT_INFRASTRUCTURE
    assert "3 restarts came no further than step 2" in run.err
