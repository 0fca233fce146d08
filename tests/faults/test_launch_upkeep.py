"""Faults of the launcher itself: its helper, its folder, its signals, the remains of a killed one."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPT, EXIT_OK
from cyxjax.files import text_in
from cyxjax.launch import output
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import ErrorRecord
from cyxjax.launch.group.protocol import Channel
from cyxjax.launch.heartbeat import Reporter
from cyxjax.launch.options import parse
from cyxjax.launch.supervise import processes
from cyxjax.launch.supervise.scratch import KEPT_RECORDS
from cyxjax.launch.supervise.supervisor import Supervisor
from cyxjax.launch.supervise.worker import Files, Worker
from cyxjax.launch.supervise.worker_group import LOST, WorkerGroup
from tests.support.launching import IGNORING, launch, start, under_way, until
from tests.support.programs import environment, fresh
from tests.support.training import STEPS_PER_EPOCH, newest_step, write_experiment

pytestmark = pytest.mark.multiprocess


def scratch_of(run) -> list[Path]:
    return sorted(run.log_dir.glob("cyxjax-*"))  # TMPDIR of the run


def test_a_folder_that_is_tidied_away_is_made_anew_and_an_error_still_shown(tmp_path):
    seen, again = tmp_path / "seen", tmp_path / "again"
    fault = {"FAULT": f"raise:1:{seen}", "UNTIL": again}
    run = under_way(tmp_path, 2, "--max-restarts", "1", fork=True, **fault)
    [folder] = scratch_of(run)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert run.logged("was created again")
    seen.touch()
    assert run.logged("restart 1 of 1")
    again.touch()
    assert run.wait().code == EXIT_OK, run.err  # the error of start 0 was read, start 1 has a folder
    assert run.err.count("was removed while the job was running and was created again") == 1
    assert "ValueError: boom, api_key=[redacted]" in run.err
    assert scratch_of(run) == []


def test_ranks_go_on_where_the_folder_cannot_be_made_again(monkeypatch):
    words = ["--no-python", "sh", "-c", "rm -r $(dirname $CYXJAX_BEAT_FILE); sleep 0.6"]
    with WorkerGroup(parse(words, os.environ), os.environ) as group:
        monkeypatch.setattr(group.scratch, "_take", Mock(side_effect=OSError("no room")))
        assert group.run(group.options.place, 0).workers[0].returncode == EXIT_OK
    assert group.scratch._take.called


def test_a_killed_launcher_leaves_no_process_and_its_folder_to_the_next_one(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "time.sleep(1000)\n"
    )
    run = start(tmp_path, 2, script=tmp_path / "parent.py")
    other = under_way(tmp_path / "other", 1, fork=True, UNTIL=tmp_path / "seen", TMPDIR=tmp_path)
    assert until(lambda: len(run.survivors()) >= 4, 90)
    run.process.kill()
    assert run.no_survivors_within(30)  # the ranks and their child processes
    run.wait()
    assert len(scratch_of(run)) == 2  # of the killed launcher, and of a live one
    launch(tmp_path, 1, fork=True, KIND="light", STEPS=2)
    assert len(scratch_of(run)) == 1
    (tmp_path / "seen").touch()
    assert other.wait().code == EXIT_OK, other.err
    assert scratch_of(run) == []


def test_of_error_records_without_a_better_place_the_newest_stay(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = parse(["--no-python", "false"], os.environ)
    other = tmp_path / "cyxjax-notes"  # a folder of another program must stay
    other.mkdir()
    (other / "first_error.json").touch()
    (other / "notes").touch()
    assert {Supervisor(options, os.environ).run() for _ in range(KEPT_RECORDS + 2)} == {1}
    output.flush()
    records = sorted(path for path in tmp_path.glob("cyxjax-*/first_error.json") if path.parent != other)
    assert len(records) == KEPT_RECORDS + 1  # before the last one ended there was the kept number
    named = re.findall("first error: (.*)", capfd.readouterr().err)
    assert records == sorted(map(Path, named[-KEPT_RECORDS - 1 :]))
    assert sorted(path.name for path in other.iterdir()) == ["first_error.json", "notes"]


@pytest.mark.parametrize("moment", ["launcher loads", "ranks load"])
def test_ctrl_c_in_the_first_seconds_is_one_line(tmp_path, moment):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    path = {"PYTHONPATH": str(tmp_path)}
    if moment == "launcher loads":  # its first module blocks until released
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\n"
            "class Slow:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'cyxjax.launch.output':\n"
            "            print('loading', file=sys.stderr, flush=True)\n"
            "            import slow\n"
            "sys.meta_path.insert(0, Slow())\n"
        )
    run = start(tmp_path, 2, script=tmp_path / "slow.py", **path)
    if moment == "launcher loads":
        assert run.logged("loading")
    else:
        assert until(lambda: len(run.survivors()) == 2, 60)
    run.process.send_signal(signal.SIGINT)
    assert run.wait().code == EXIT_INTERRUPT
    assert [line for line in run.err.splitlines() if line != "loading"][1:] == []
    assert "Traceback" not in run.err


def test_what_asks_for_no_end_ends_nobody_and_nothing_is_said(tmp_path):
    # SIGUSR1 while launcher and ranks start and in the steps; SIGUSR2; SIGHUP under nohup; Python's warnings
    wrap = (*IGNORING, str(int(signal.SIGHUP)))
    env = {"STEPS": 100_000, "UNTIL": tmp_path / "seen", "PYTHONWARNINGS": "error"}
    run = start(tmp_path, 2, KIND="light", wrap=wrap, **env)
    assert until(lambda: run.survivors(), 60)
    assert until(lambda: run.process.send_signal(signal.SIGUSR1) or run.reached("under way", 0, 0.1), 90)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        for pid in (run.process.pid, *run.survivors()):
            os.kill(pid, number)
    (tmp_path / "seen").touch()
    assert (run.wait().code, run.err) == (EXIT_OK, "")


def test_the_ends_of_ranks_are_seen_where_sigchld_was_ignored(tmp_path):
    wrap = (*IGNORING, str(int(signal.SIGCHLD)))
    run = start(tmp_path, 2, KIND="light", FAULT="segv:1:3", STEPS=400, wrap=wrap).wait()
    assert run.no_survivors_within(30), run.err
    assert (run.code, run.first["type"]) == (EXIT_INFRASTRUCTURE, "SIGSEGV"), run.err


@pytest.mark.slow
def test_sigusr1_all_through_a_training_saves_when_it_can_and_goes_on(tmp_path):
    config = write_experiment(tmp_path, epochs=2)
    words = [sys.executable, "-m", "cyxjax.train", "--config", str(config)]
    # As from our launcher: the rank ignores SIGUSR1 until it installs a handler.
    deaf = [*IGNORING, str(int(signal.SIGUSR1)), *words]
    with subprocess.Popen(
        deaf, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        command = Path(f"/proc/{process.pid}/cmdline")
        assert until(lambda: b"-m\0cyxjax.train" in command.read_bytes().split(b"-c")[0], 90)  # not our words
        while not until(lambda: process.poll() is not None, 0.05):
            process.send_signal(signal.SIGUSR1)
        printed = process.communicate()[0]
    assert process.returncode == EXIT_OK, printed
    assert newest_step(config) == 2 * STEPS_PER_EPOCH, printed


def test_a_start_whose_number_comes_again_knows_nothing_of_the_one_before(tmp_path):
    """A restarted first host counts from 0; the other launchers keep their folders."""
    with WorkerGroup(parse(["--no-python", "sh", "-c", "kill -9 $$"], os.environ), os.environ) as group:
        before = group.run(group.options.place, 0).workers[0].files
        Reporter(before.beat).report(7, "step")
        records.save(ErrorRecord(0, "ValueError", "of the start before"), before.error)
        Path(before.stacks).write_text("of the start before")
        start = group.run(group.options.place, 0)
        assert (start.step, text_in(start.workers[0].files.stacks)) == (-1, "")
    assert [record.type for record in start.records] == ["SIGKILL"]


def test_a_rank_whose_log_file_cannot_be_opened_runs_without_it(tmp_path, capfd):
    (tmp_path / "start_1").touch()  # no folder can be created, as on a full disk
    words = ["--log-dir", str(tmp_path), "--no-python", "echo", "hello"]
    with WorkerGroup(parse(words, os.environ), os.environ) as group:
        starts = [group.run(group.options.place, number) for number in range(2)]
    assert [start.workers[0].returncode for start in starts] == [EXIT_OK] * 2
    output.flush()
    shown = capfd.readouterr()
    assert shown.out == "hello\n" * 2
    assert shown.err.count(str(tmp_path / "start_1")) == 1


def test_the_record_of_an_earlier_job_goes_when_one_begins(tmp_path):
    (tmp_path / "first_error.json").touch()
    options = parse(["--log-dir", str(tmp_path), "--no-python", "true"], os.environ)
    assert Supervisor(options, os.environ).run() == EXIT_OK
    assert not (tmp_path / "first_error.json").exists()


def test_a_rank_keeps_the_level_of_native_logs_that_was_set():
    words = ("-m", "cyxjax.launch", "--no-python", "printenv", "TF_CPP_MIN_LOG_LEVEL")
    assert fresh(*words, env=environment(TF_CPP_MIN_LOG_LEVEL="0")).stdout == "0\n"


def test_the_record_of_a_job_stays_where_a_host_joins_it_later(tmp_path, monkeypatch):
    (tmp_path / "first_error.json").touch()
    options = parse(["--log-dir", str(tmp_path), "--no-python", "true"], os.environ)
    supervisor, (here, first) = Supervisor(options, os.environ), socket.socketpair()
    join = partial(supervisor._one_start, Channel(here), {"start": 1, "base_rank": 0, "world_size": 1})
    monkeypatch.setattr(supervisor, "_take_part", join)
    with here, first:
        supervisor.run()
    assert (tmp_path / "first_error.json").exists()


def test_the_error_of_a_start_is_shown_when_another_begins_not_as_the_last(tmp_path, monkeypatch, capfd):
    once = f"test -e {tmp_path}/failed || {{ touch {tmp_path}/failed; exit 75; }}"
    supervisor = Supervisor(parse(["--no-python", "sh", "-c", once], os.environ), os.environ)
    here, first = socket.socketpair()

    def take_part():
        for number in range(2):
            supervisor._one_start(Channel(here), {"start": number, "base_rank": 0, "world_size": 1})
        supervisor._show("no more hosts")

    monkeypatch.setattr(supervisor, "_take_part", take_part)
    with here, first:
        supervisor.run()
    output.flush()
    shown = capfd.readouterr().err
    assert shown.index("ended with exit code 75") < shown.index("no more hosts\n")


@pytest.mark.parametrize(
    ("program", "events", "signalled"),
    [
        (
            "exec sleep 100",
            [{"end": 0, "polite": False}, signal.SIGTERM],
            signal.SIGTERM,
        ),  # not by the signal
        # meanwhile a host is gone: the group cannot wait
        ("trap '' TERM; exec sleep 100", [{"end": 0, "polite": True}, {"end": 0, "polite": False}], None),
    ],
    ids=["a signal comes after", "they were asked first"],
)
def test_ranks_that_the_group_ends_are_killed_by_it(program, events, signalled):
    words = ["--no-python", "sh", "-c", program]
    with WorkerGroup(parse(words, os.environ), os.environ) as group:
        for event in events:
            group.put(event)
        start = group.run(group.options.place, 0)
    assert (start.signalled, start.killed, start.hurried) == (signalled, [0], "when the group ended")


def test_ranks_save_after_the_end_of_the_job_although_the_first_host_is_gone(tmp_path):
    save = f"sleep 0.5; touch {tmp_path}/saved; exit 0"
    program = f"trap '{save}' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done"
    with WorkerGroup(parse(["--no-python", "sh", "-c", program], os.environ), os.environ) as group:

        def end():
            assert until((tmp_path / "up").exists, 30)
            group.put({"over": 0, "why": ""})
            group.put(LOST)  # it leaves a moment later

        teller = threading.Thread(target=end)
        teller.start()
        start = group.run(group.options.place, 0)
        teller.join()
    assert (start.killed, (tmp_path / "saved").exists()) == ([], True)


@pytest.mark.parametrize(("before", "inside"), [(signal.SIG_DFL, signal.SIG_IGN), (print, print)])
def test_sigusr2_is_ignored_while_there_are_ranks_unless_the_program_handles_it(before, inside):
    ours = signal.signal(signal.SIGUSR2, before)
    try:
        with WorkerGroup(parse(["--no-python", "true"], os.environ), os.environ):
            assert signal.getsignal(signal.SIGUSR2) is inside
        assert signal.getsignal(signal.SIGUSR2) is before
    finally:
        signal.signal(signal.SIGUSR2, ours)


def worker_of(folder: Path) -> Worker:
    files, env = Files.within(str(folder), 0, 0), {"PATH": "/usr/bin:/bin"}
    return Worker(0, ["true"], env, files, prefix="", shown=False, log_dir=None, start=0)


def test_a_rank_that_opens_its_file_when_the_folder_was_made_again_is_heard(tmp_path):
    worker, ended = worker_of(tmp_path), threading.Event()
    Path(worker.files.beat).unlink()
    Reporter(worker.files.beat).report(7, "step")
    worker.watch(lambda _: ended.set())
    assert ended.wait(60)
    assert worker.progress().step == 7
    worker.close()


def test_no_rank_starts_where_its_file_cannot_be_opened(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(processes, "start", lambda command, env: started.append(command))
    with pytest.raises(FileNotFoundError):
        worker_of(tmp_path / "none")
    assert started == []


@pytest.mark.parametrize("number", range(20))
def test_an_end_is_noticed_while_signals_are_sent(tmp_path, number):
    worker, ended = worker_of(tmp_path), threading.Event()
    worker.watch(lambda _: ended.set())
    while worker.returncode is None and not ended.wait(0.0):
        worker.signal(0)  # checks that the process exists, without effect on it
    assert ended.wait(60)
    assert worker.returncode == 0
    worker.close()
