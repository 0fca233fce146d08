"""Backends, threads, flags and devices: what is written for jax, and what is left as the user set it."""

import os
import subprocess
import sys

import jax
import pytest

from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch.backend import jax_private
from cyxjax.launch.environment import (
    add_flags,
    advice,
    choose,
    collective_timeout_s,
    explain,
    local_devices,
    pool_threads,
    prepare,
    thread_share,
    visible_gpus,
)
from cyxjax.launch.topology import Topology

TWO = Topology(rank=1, world_size=2, local_world_size=2)


@pytest.mark.parametrize(
    ("wish", "platform", "gpu", "got"),
    [
        ("auto", "linux", True, "nccl"),
        ("auto", "linux", False, "gloo"),
        ("auto", "darwin", True, "nccl"),
        ("auto", "darwin", False, "gloo"),
        ("auto", "win32", True, "gloo"),
        ("gloo", "linux", True, "gloo"),
        ("nccl", "linux", True, "nccl"),
    ],
)
def test_backend_table(wish, platform, gpu, got):
    assert choose(wish, platform, gpu) == got


@pytest.mark.parametrize(("platform", "gpu"), [("linux", False), ("win32", True)])
def test_nccl_without_its_hardware_offers_the_cpu(platform, gpu):
    with pytest.raises(GroupError, match="NCCL.* DISTRIBUTED_BACKEND=cpu"):
        choose("nccl", platform, gpu)


def test_one_mac_gains_nothing_from_processes():
    assert "no parallel benefit" in (advice("gloo", "darwin", 2, 2) or "")
    assert "no parallel benefit" in (advice("gloo", "linux", 4096, 4096) or "")
    assert advice("nccl", "linux", 8, 8) is None


@pytest.mark.parametrize(
    ("gpus", "local_rank", "here", "got"),
    [
        (["3"], 5, 8, None),  # one visible: it is ours, whatever LOCAL_RANK says
        (["0", "1", "2", "3"], 0, 1, None),  # one process per host keeps all
        (["0", "1", "2", "3"], 1, 2, [2, 3]),
        (["0", "1"], 1, 0, [1]),  # nobody said how many are here: one each
        ([], 0, 2, None),
    ],
)
def test_devices_of_a_local_rank(gpus, local_rank, here, got):
    assert local_devices(gpus, local_rank, here) == got


def test_more_processes_than_gpus():
    with pytest.raises(ConfigError, match="LOCAL_RANK=2 .*3 .*2 GPUs"):
        local_devices(["0", "1"], 2, 3)
    # Two processes on one H100: NCCL ends with "Duplicate GPU detected" in ten lines of XLA's.
    with pytest.raises(ConfigError, match="LOCAL_RANK=0 .*2 .*1 GPU "):
        local_devices(["0"], 0, 2, limited=False)
    assert local_devices(["0"], 0, 1, limited=False) is None


def test_a_jax_loaded_before_the_group_takes_the_cpu_too():
    """It read JAX_PLATFORMS when it was imported; on a GPU host it would start there."""
    code = (
        "import os, jax; os.environ['DISTRIBUTED_BACKEND'] = 'cpu'; import cyxjax as cx; "
        "cx.distributed.init(); print(jax.config.jax_platforms)"
    )
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["cpu"], done.stderr


def test_visible_gpus_follow_cuda(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl"):
        (tmp_path / name).touch()
    folder = str(tmp_path)
    assert visible_gpus({}, folder) == ["0", "1", "10"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,GPU-ab"}, folder) == ["1", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, folder) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, folder) == ["0"]  # CUDA stops at -1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, str(tmp_path / "none")) == []


def test_threads_are_shared_out():
    assert [thread_share(n, cores=8) for n in (0, 1, 3, 16)] == [8, 8, 2, 1]


def test_prepare_writes_what_is_missing():
    env: dict[str, str] = {}
    prepare(TWO, env=env)
    assert env["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] == "gloo"
    assert "--xla_cpu_collective_timeout_seconds=600" in env["XLA_FLAGS"].split()
    assert env["NPROC"] == env["OMP_NUM_THREADS"] == str(thread_share(2))


def test_prepare_keeps_what_the_user_set():
    mine = {
        "NPROC": "3",
        "OMP_NUM_THREADS": "4",
        "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=7 --other",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi",
    }
    env = dict(mine)
    prepare(TWO, env=env)
    assert {name: env[name] for name in mine if name != "XLA_FLAGS"} == {
        name: mine[name] for name in mine if name != "XLA_FLAGS"
    }
    assert env["XLA_FLAGS"].split()[:2] == ["--xla_cpu_collective_timeout_seconds=7", "--other"]
    assert env["XLA_FLAGS"].count("xla_cpu_collective_timeout") == 1


def test_several_cpu_devices_get_a_thread_each():
    env: dict[str, str] = {"JAX_NUM_CPU_DEVICES": "64"}
    prepare(TWO, env=env)
    assert env["NPROC"] == "64"


def test_a_launchers_thread_count_may_be_raised_but_not_a_users():
    ours = {"NPROC": "1", "CYXJAX_NPROC": "1", "JAX_NUM_CPU_DEVICES": "64"}
    prepare(TWO, env=ours)
    assert ours["NPROC"] == "64"


def test_the_cpu_backend_keeps_jax_off_the_gpus():
    env: dict[str, str] = {}
    prepare(Topology(backend="cpu"), env=env)
    assert env["JAX_PLATFORMS"] == "cpu"


def test_the_coordinator_is_not_dialled_through_a_proxy():
    env = {"http_proxy": "http://proxy:3128", "no_proxy": "internal"}
    prepare(Topology(rank=1, world_size=2, master_addr="10.0.0.1"), env=env)
    assert set(env["no_grpc_proxy"].split(",")) == {"internal", "10.0.0.1", "127.0.0.1"}
    assert (env["http_proxy"], env["no_proxy"]) == ("http://proxy:3128", "internal")
    free: dict[str, str] = {}
    prepare(TWO, env=free)
    assert "no_grpc_proxy" not in free


def test_flags_are_added_once():
    assert add_flags("--a=1  --b", {"--a": 2, "--c": 3}) == "--a=1 --b --c=3"


def test_nccl_settings_are_honoured_or_explained():
    assert collective_timeout_s({"NCCL_TIMEOUT": "1800"}) == 1800
    assert collective_timeout_s({}, timeout_ms=900_000) == 900
    with pytest.raises(ConfigError, match="NCCL_TIMEOUT"):
        collective_timeout_s({"NCCL_TIMEOUT": "long"})
    lines = explain({"NCCL_TIMEOUT": "1800", "NCCL_DEBUG": "INFO"}, "gloo")
    assert "1800 s" in lines[0]
    assert "no effect" in lines[1]


def test_the_room_starts_without_jax():
    code = (
        "import sys, cyxjax.launch, cyxjax.launch.clusters, cyxjax.launch.connect, cyxjax.launch.environment;"
        "sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def jax_is_not_running(monkeypatch):
    monkeypatch.setattr(jax_private, "backend_runs", lambda: False)


def test_an_exact_run_has_its_own_number_of_threads_in_every_process(monkeypatch):
    # the launcher's share is ours to change; two ranks with one device each get what one rank would
    jax_is_not_running(monkeypatch)
    for local_world_size in (1, 2):
        env = {"NPROC": "1", "CYXJAX_NPROC": "1"}
        place = Topology(0, local_world_size, local_world_size=local_world_size, backend="nccl")
        prepare(place, env=env, threads=8)
        assert env["NPROC"] == "8"
        assert pool_threads(1, env) == 8


def test_a_users_nproc_that_differs_is_refused_by_name():
    env = {"NPROC": "3"}
    with pytest.raises(ConfigError, match="NPROC=3 .* 8 CPU threads.*exact_threads"):
        prepare(Topology(0, 1, backend="nccl"), env=env, threads=8)
    assert env["NPROC"] == "3"
    prepare(Topology(0, 1, backend="nccl"), env=env, threads=3)  # the same number is no quarrel


def test_threads_cannot_be_had_once_jax_runs():
    jax.devices()
    with pytest.raises(GroupError, match=r"threads=5.* init\(\)"):
        prepare(Topology(0, 1, backend="nccl"), env={}, threads=5)


def test_the_pool_is_never_smaller_than_the_devices():
    assert pool_threads(8, {"NPROC": "2"}) == 8
