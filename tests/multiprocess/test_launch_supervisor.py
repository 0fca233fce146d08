"""What the launcher does for healthy ranks: prefixes, logs, filters, other programs."""

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.launching import under_way
from tests.support.programs import fresh

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("scratch")]
TALK = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.py"
    path.write_text(TALK)
    return path


def run(*words):
    return fresh("-m", "cyxjax.launch", *words, timeout=60)


def test_prefixes_logs_tee_redirects_and_filter(talk, tmp_path):
    logs = tmp_path / "logs"
    where = ["--log-dir", logs, "-r", "3", "-t", "0:3,1:3", "--local-ranks-filter", "0,2"]
    done = run("--nproc-per-node", 3, *where, talk)
    assert done.returncode == 0
    # 1 is filtered, 2 goes to its file only
    assert (done.stdout, done.stderr) == ("[rank 0] out 0\n", "[rank 0] err 0\n")
    for rank in range(3):
        text = (logs / "start_0" / f"rank_{rank}.log").read_text()
        assert sorted(text.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_modules_and_other_programs(talk):
    assert "usage: " in run("-m", "json.tool", "--help").stdout
    assert run(talk).stdout == "out 0\n"  # one rank needs no name
    assert run("--no-python", "echo", "hello").stdout == "hello\n"
    missing = run("--no-python", "/no/such/program")
    assert missing.returncode == 1
    assert "cannot start /no/such/program" in missing.stderr


def test_a_job_that_ends_while_jaxlib_is_loaded_waits_for_that():
    program = (
        "import sys, time\n"
        "from cyxjax.launch import __main__ as launcher\n"
        "from cyxjax.launch.backend import jax_private\n"
        "loading = []\n"
        "def load():\n"
        "    loading.append(1)\n"
        "    time.sleep(0.5)\n"  # as long as loading takes on a busy machine
        "    print('loaded')\n"
        "    return False\n"
        "jax_private.can_serve = load\n"
        "code = launcher.main(['--no-python', 'sleep', '0.2'])\n"
        "assert loading, 'the job ended before'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr


def test_jax_processes_of_one_host_meet_where_only_this_user_can_connect_and_say_nothing(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a Unix socket has a short path
        job = under_way(tmp_path, KIND="jax", UNTIL=tmp_path / "seen", TMPDIR=folder)
        launcher = psutil.Process(job.process.pid)
        listening = [one for one in launcher.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        [path] = Path(folder).glob("cyxjax-*/*.jax")
        mode, is_socket = path.parent.stat().st_mode, path.is_socket()
        (tmp_path / "seen").touch()
        assert job.wait().code == 0, job.err
    assert len(listening) == 1  # the server of the group, which requires the token
    assert is_socket
    assert stat.S_IMODE(mode) == 0o700
    assert (job.err, job.first) == ("", {})
    assert "Gloo" not in job.out
    assert job.out.count("total 2") == 2
