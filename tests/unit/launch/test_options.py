"""The launcher's command line: torch's flags in both spellings, the guides' spellings, and refusals."""

import os
import signal
import subprocess
import sys

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import discover
from cyxjax.launch.environment import thread_share
from cyxjax.launch.options import parse
from cyxjax.launch.supervise import processes
from cyxjax.launch.supervise.worker import Files, environment

HERE = __file__


def place(text, env=None):
    return parse([*text.split(), HERE], env or {}).place


@pytest.mark.parametrize("text", ["--nproc-per-node 3", "--nproc_per_node=3 --standalone", "--gpus 3"])
def test_one_host_meets_on_loopback_at_a_free_port(text):
    found = place(text)
    assert (found.nproc, found.world_size, found.base_rank) == (3, 3, 0)
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 0)  # 0: any free one
    assert (found.is_alone, len(found.token)) == (True, 64)


SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
BY_HAND = {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "192.168.1.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("text", "env", "first", "world_size", "address", "run_id"),
    [
        ("--nnodes=2 --node_rank=1 --master_addr=a --master_port=29600", {}, 4, 8, ("a", 29600), "job"),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint b:7 --rdzv-id t7", {}, 0, 8, ("b", 7), "t7"),
        ("", BY_HAND, 4, 8, ("192.168.1.1", 29500), "job"),  # this host's first rank
        ("", SLURM, 4, 8, ("n1", None), "slurm-5.0"),  # one launcher per node
        ("--nnodes 1:3", SLURM, 4, 12, ("n1", None), "slurm-5.0"),
        ("--nnodes 1:3 --master-addr a", {}, 4, 12, ("a", 29500), "job"),  # which host, the first one says
        ("--nnodes 1:3 --master-addr a --node-rank 0", {}, 0, 12, ("a", 29500), "job"),
        ("--nnodes 1:3 --master-addr a --node-rank 2", {}, 4, 12, ("a", 29500), "job"),
    ],
)
def test_several_hosts(text, env, first, world_size, address, run_id):
    found = place(f"--nproc-per-node 4 {text}", env)
    assert (found.base_rank, found.world_size, found.run_id) == (first, world_size, run_id)
    assert (found.master_addr, address[1] and found.master_port) == address


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([HERE, "--epochs", "3"], [sys.executable, "-u", HERE, "--epochs", "3"]),
        (
            ["-m", "cyxjax.train", "--nnodes", "x"],
            [sys.executable, "-u", "-m", "cyxjax.train", "--nnodes", "x"],
        ),
        (["--no-python", "python", "train.py"], ["python", "train.py"]),
        (["--gpus", "2", "--script", HERE], [sys.executable, "-u", HERE]),
        (["--", HERE, "-m"], [sys.executable, "-u", HERE, "-m"]),
    ],
)
def test_the_program_and_its_arguments_are_left_alone(argv, command):
    assert parse(argv, {}).command == command


def test_auto_takes_the_gpus_and_else_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5, 6})  # of a pinned job
    assert place("--nproc-per-node cpu").nproc == 3


def test_where_the_output_goes(tmp_path):
    words = "--nproc-per-node 4 -r 3 -t 0:3,3:1 --local-ranks-filter 0,2,3"
    assert parse([*words.split(), "--log-dir", str(tmp_path), HERE], {}).shown == {0, 3}
    assert parse([*words.split(), HERE], {}).shown == {0, 2, 3}  # without a folder it would be lost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--nproc-per-node zero", "--nproc-per-node.*'zero'"),
        ("--nproc-per-node 0", "--nproc-per-node.*'0'"),
        ("--nproc-per-node gpu", "no NVIDIA GPU"),
        ("--nproc 2", "--nproc .* '--nproc-per-node'"),
        ("--nnodes 2", "without --node-rank"),
        ("--nnodes 2 --node-rank 2 --master-addr a", "RANK=2 .*WORLD_SIZE=2"),
        ("--nnodes 2 --node-rank 1", "--master-addr"),
        ("--nnodes 4:1 --master-addr a", "--nnodes: '1'"),
        ("--nnodes 1:4", "--master-addr"),
        ("--max-restarts many", "--max-restarts: 'many'"),
        ("--local-ranks-filter a", "--local-ranks-filter.*'a'"),
        ("--rdzv-endpoint host", "--rdzv-endpoint='host' .*HOST:PORT"),
        ("--master-port 70000", "--master-port: '70000'"),
        ("--hang-timeout soon", "--hang-timeout='soon'"),
        ("--nproc-per-node 2 --script none.py", r"'none\.py'"),
    ],
)
def test_refusals_name_the_flag_and_hint(text, message):
    with pytest.raises(ConfigError, match=rf"^(?=.*HINT: ).*{message}"):
        parse([*text.split(), HERE, "--epochs", "3"], {"CUDA_VISIBLE_DEVICES": ""})


def test_too_many_ranks_and_no_program():
    with pytest.raises(ConfigError, match="nprocs=4 .*RANK=6 .*WORLD_SIZE=8"):
        place("--nproc-per-node 4", BY_HAND | {"RANK": "6"})
    with pytest.raises(ConfigError, match=r"script\.py"):
        parse(["--nproc-per-node", "2"], {})


def test_the_guardian_ends_only_what_it_still_watches():
    def sleeper():
        code = "import time; time.sleep(100)"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    watched, released = sleeper(), sleeper()
    try:
        guard = processes.Reaper()
        for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM"):  # to all processes of a job
            guard._process.send_signal(getattr(signal, name))
        guard.watch(watched.pid)
        guard.watch(released.pid)
        guard.release(released.pid)
        guard.close()
        assert watched.wait(10) == -9
        assert released.poll() is None
    finally:
        released.kill()
        released.wait()


def test_what_a_rank_finds_in_its_environment():
    found = place("--nnodes=2 --nproc_per_node=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=1")
    outer = {"PATH": "/bin", "NPROC": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # inside torchrun
    env = environment(found, 1, 3, Files.within("/d", 3, 3), outer)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
        "3",
        "4",
        "1",
        "2",
    )
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["RESTART_COUNT"]) == ("10.0.0.1", "1", "3")
    assert (env["PATH"], env["NPROC"]) == ("/bin", "7")
    assert env["CYXJAX_BEAT_FILE"] == "/d/rank_3_3.beat"
    assert discover(env).address == "10.0.0.1:1"
    env = environment(found, 1, 3, Files.within("/d", 3, 3), {})
    assert env["NPROC"] == env["CYXJAX_NPROC"] == env["OMP_NUM_THREADS"] == str(thread_share(2))
