"""What the launcher does for healthy ranks: prefixes, logs, filters, signals passed on, other programs."""

import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.launching import launch, start

pytestmark = pytest.mark.multiprocess
TALK = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a failed job without --log-dir leaves its record there


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.py"
    path.write_text(TALK)
    return path


def run(*words):
    command = [sys.executable, "-m", "cyxjax.launch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_line_names_its_rank(talk):
    done = run("--nproc-per-node", 2, talk)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


def test_logs_tee_redirects_and_filter(talk, tmp_path):
    logs = tmp_path / "logs"
    done = run(
        "--nproc-per-node",
        3,
        "--log-dir",
        logs,
        "-r",
        "3",
        "-t",
        "0:3,1:3",
        "--local-ranks-filter",
        "0,2",
        talk,
    )
    assert done.stdout == "[rank 0] out 0\n"  # 1 is filtered, 2 goes to its file only
    for rank in range(3):
        text = (logs / "start_0" / f"rank_{rank}.log").read_text()
        assert sorted(text.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_modules_and_other_programs(talk):
    assert "usage: " in run("-m", "json.tool", "--help").stdout
    assert run(talk).stdout == "out 0\n"  # one rank needs no name
    assert run("--no-python", "echo", "hello").stdout == "hello\n"


def test_a_program_that_cannot_start_is_said():
    done = run("--no-python", "/no/such/program")
    assert done.returncode == 1
    assert "cannot start /no/such/program" in done.stderr


def test_a_log_folder_that_cannot_be_is_a_configuration_error(talk):
    done = run("--log-dir", talk / "below_a_file", talk)
    assert done.returncode == 2
    assert "cannot be made" in done.stderr


def test_usr1_is_passed_on_and_usr2_shows_where_all_are(tmp_path):
    job = start(tmp_path, 2, KIND="light", STEPS=4000)
    assert all(job.reached("under way", rank) for rank in range(2))
    job.process.send_signal(signal.SIGUSR2)
    assert job.told("--- rank 1 ---")
    job.process.send_signal(signal.SIGTERM)  # light ranks have no handler: they end at once
    job.wait()
    assert job.err.count("in train") >= 2
    assert "--- rank 1 ---" in job.err
    script = tmp_path / "usr1.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    job = start(tmp_path / "b", 2, script=script)
    assert all(job.reached("ready", rank) for rank in range(2))
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait().code == 0
    assert job.out.count("saved") == 2


def test_a_group_of_jax_processes_ends_cleanly_and_says_nothing_else(tmp_path):
    job = launch(tmp_path, 2, KIND="jax", STEPS=3)
    assert job.code == 0
    assert job.out.count("finished 3 steps, start 0, total 2") == 2
    assert "Gloo" not in job.out + job.err
    assert job.err == ""
    assert job.first == {}


def test_a_job_that_ends_while_jaxlib_is_loaded_waits_for_that():
    program = (
        "import sys, time\n"
        "from cyxjax.launch import __main__ as launcher\n"
        "from cyxjax.launch.backend import jax_private\n"
        "loading = []\n"
        "def load():\n"
        "    loading.append(1)\n"
        "    time.sleep(0.5)\n"  # as long as it takes to load on a busy machine
        "    print('loaded')\n"
        "    return False\n"
        "jax_private.can_serve = load\n"
        "code = launcher.main(['--no-python', 'sleep', '0.2'])\n"
        "assert loading, 'the job ended before'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr


def test_on_one_host_jax_coordinates_where_only_this_user_can_connect(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a Unix socket has a short path
        run = start(tmp_path, 2, KIND="jax", STEPS=4000, UNTIL=tmp_path / "seen", TMPDIR=folder)
        assert run.reached("under way", 0)
        launcher = psutil.Process(run.process.pid)
        listening = [one for one in launcher.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        [path] = Path(folder).glob("cyxjax-*/*.jax")
        mode, is_socket = path.parent.stat().st_mode, path.is_socket()
        (tmp_path / "seen").touch()
        assert run.wait().code == 0, run.err
    assert len(listening) == 1  # the group's server, which asks for the token
    assert is_socket
    assert stat.S_IMODE(mode) == 0o700
