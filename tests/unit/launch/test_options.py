"""The launcher's command line: torch's flags in both spellings, the guides' spellings, and refusals."""

import os
import subprocess
import sys

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch.options import parse
from cyxjax.launch.supervise import processes
from cyxjax.launch.supervise.worker import Files, environment

HERE = __file__


def place(text, env=None):
    return parse([*text.split(), HERE], env or {}).place


@pytest.mark.parametrize(
    "text",
    [
        "--nproc-per-node 3",
        "--nproc_per_node 3",
        "--nproc_per_node=3",
        "--gpus 3",
        "--standalone --nproc-per-node=3",
    ],
)
def test_one_host_meets_on_loopback_at_a_free_port(text):
    found = place(text)
    assert (found.nproc, found.world_size, found.base_rank) == (3, 3, 0)
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 0)  # 0: any free one
    assert found.is_alone
    assert len(found.token) == 64


def test_several_hosts_as_under_torchrun():
    found = place("--nnodes=2 --nproc_per_node=4 --node_rank=1 --master_addr=10.0.0.1 --master_port=29600")
    assert (found.base_rank, found.world_size, found.is_first) == (4, 8, False)
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 29600)


def test_rdzv_endpoint_is_the_same_address():
    found = place("--nnodes 2 --node-rank 0 --rdzv-backend c10d --rdzv-endpoint host0:7 --rdzv-id train7")
    assert (found.master_addr, found.master_port, found.run_id) == ("host0", 7, "train7")


def test_rank_in_the_environment_is_this_hosts_first_rank():
    env = {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "192.168.1.1", "MASTER_PORT": "29500"}
    found = place("--nproc_per_node=4", env)
    assert (found.base_rank, found.world_size, found.is_first) == (4, 8, False)
    assert found.master_addr == "192.168.1.1"
    with pytest.raises(ConfigError, match="ranks 6 .*9 .*8 .*WORLD_SIZE"):
        place("--nproc_per_node=4", env | {"RANK": "6"})


def test_one_launcher_per_slurm_node():
    env = {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    found = place("--nproc-per-node 4", env)
    assert (found.base_rank, found.world_size, found.master_addr) == (4, 8, "n1")
    assert found.run_id == "slurm-5.0"


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


def test_auto_takes_the_gpus_and_else_the_cores():
    assert place("--nproc-per-node cpu").nproc == os.cpu_count()


def test_where_the_output_goes(tmp_path):
    options = parse(
        f"--nproc-per-node 3 --log-dir {tmp_path} -r 3 -t 0:3 --local-ranks-filter 0,2 {HERE}".split(), {}
    )
    assert options.only_files == {1, 2}
    assert options.shown == {0, 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--nproc-per-node zero", "--nproc-per-node='zero'"),
        ("--nproc-per-node 0", "--nproc-per-node='0'"),
        ("--nproc-per-node gpu", "no NVIDIA GPU"),
        ("--nproc 2", "'--nproc'.* '--nproc-per-node'"),
        ("--nnodes 2", "without --node-rank"),
        ("--nnodes 2 --node-rank 2 --master-addr a", "--node-rank='2'"),
        ("--nnodes 2 --node-rank 1", "--master-addr"),
        ("--nnodes 4:1 --master-addr a", "--nnodes=4:1"),
        ("--nnodes 0:2 --master-addr a", "--nnodes='0'"),
        ("--nnodes 1:4", "--master-addr"),
        ("--max-restarts -1", "--max-restarts: '-1'"),
        ("--max-restarts many", "--max-restarts: 'many'"),
        ("--tee 3", "with --log-dir"),
        ("--log-dir /x --tee 9", "--tee='9'"),
        ("--local-ranks-filter a", "--local-ranks-filter='a'"),
        ("--rdzv-endpoint host", "--rdzv-endpoint='host' .*HOST:PORT"),
        ("--master-port 70000", "MASTER_PORT='70000'"),
        ("--hang-timeout soon", "--hang-timeout='soon'"),
        ("--nproc-per-node 2 --script none.py", r"'none\.py'"),
    ],
)
def test_refusals_name_the_flag_and_hint(text, said):
    env = {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ConfigError, match=said) as caught:
        parse([*text.split(), HERE], env)
    assert "HINT: " in str(caught.value)


def test_too_many_ranks_for_the_world():
    with pytest.raises(ConfigError, match="ranks 6 .*9 .*8"):
        place("--nproc-per-node 4", {"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "a"})


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_elsewhere_than_on_linux_the_command_is_started_as_it_is(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert processes.tether(["python", "train.py"], 7) == ["python", "train.py"]


def test_on_linux_a_rank_is_tied_to_its_launcher(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert processes.tether(["python", "train.py"], 7)[-3:] == ["7", "python", "train.py"]


def test_the_guardian_ends_only_what_it_still_watches():
    def sleeper():
        code = "import time; time.sleep(100)"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    watched, released = sleeper(), sleeper()
    try:
        guard = processes.Reaper()
        guard.watch(watched.pid)
        guard.watch(released.pid)
        guard.release(released.pid)
        guard.close()
        assert watched.wait(10) == -9
        assert released.poll() is None
    finally:
        released.kill()
        released.wait()


def test_no_program():
    with pytest.raises(ConfigError, match=r"script\.py"):
        parse(["--nproc-per-node", "2"], {})


def test_what_a_rank_finds_in_its_environment():
    found = place("--nnodes=2 --nproc_per_node=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=1")
    env = environment(found, 1, 3, Files.within("/d", 3, 3), {"PATH": "/bin", "NPROC": "7"})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
        "3",
        "4",
        "1",
        "2",
    )
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["RESTART_COUNT"]) == ("10.0.0.1", "1", "3")
    assert (env["PATH"], env["NPROC"]) == ("/bin", "7")
    assert env["CYXJAX_BEAT_FILE"] == "/d/start_3_rank_3.beat"
