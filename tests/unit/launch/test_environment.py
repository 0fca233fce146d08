"""Settings before jax starts: platform, devices, threads, flags; the user's own settings are kept."""

import os

import jax
import pytest

from cyxjax.distributed.agreement import Peers, agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch import connect as connecting
from cyxjax.launch import environment
from cyxjax.launch.backend import jax_private
from cyxjax.launch.clusters import discover
from cyxjax.launch.environment import (
    add_flags,
    advice,
    check_started,
    collective_timeout_s,
    local_devices,
    pool_threads,
    prepare,
    settle,
    thread_share,
    visible_gpus,
)
from cyxjax.launch.topology import TPU_SLICE, Topology
from tests.support import forked

ALONE, TWO = Topology(), Topology(rank=1, world_size=2, local_world_size=2)
# Variables in Google's documentation and jax's cluster detection, for a v5litepod-16 of four hosts.
TPU_VM = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
SLICE = TPU_VM | {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3"}
SLICES = SLICE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


def prepared(topology=TWO, threads=None, **env):
    prepare(topology, env=env, threads=threads)
    return env


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """Device files of three GPUs, without the variable that sets jax in these tests to the CPU."""
    monkeypatch.setattr(environment, "_chosen_in_jax", lambda: "")
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "kfd"):
        (tmp_path / name).touch()
    return str(tmp_path)


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({}, ["0", "1", "10"]),
        ({"CUDA_VISIBLE_DEVICES": "1,GPU-ab"}, ["1", "GPU-ab"]),
        (NO_GPU, []),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ["0"]),  # CUDA stops at -1
    ],
)
def test_visible_gpus_follow_cuda(devices, env, gpus):
    assert visible_gpus(env, devices) == gpus
    assert visible_gpus(env, f"{devices}/none") == []


@pytest.mark.parametrize(
    ("backend", "env", "got"),
    [
        ("auto", {}, "nccl"),
        ("auto", {"JAX_PLATFORMS": "cuda"}, "nccl"),
        ("auto", {"JAX_PLATFORMS": "cpu"}, "gloo"),
        ("auto", NO_GPU, "gloo"),
        ("auto", NO_GPU | {"JAX_PLATFORMS": "rocm,cpu"}, "gloo"),
        ("gloo", {}, "gloo"),
        ("nccl", {}, "nccl"),
        ("nccl", NO_GPU, "NCCL.* DISTRIBUTED_BACKEND=cpu"),
        ("auto", NO_GPU | {"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS"),
    ],
)
def test_an_nvidia_gpu_comes_first_and_elsewhere_the_platform_is_left_to_jax(devices, backend, env, got):
    topology = Topology(1, 2, backend=backend)
    if got in ("nccl", "gloo"):
        assert settle(topology, env, devices) == got
    else:
        with pytest.raises((GroupError, ConfigError), match=got):
            settle(topology, env, devices)


@pytest.mark.parametrize(
    ("topology", "chosen", "started", "processes", "got"),
    [
        (TWO, "gloo", "gpu", 2, "gpu"),
        (TWO, "gloo", "tpu", 2, "tpu"),
        (TWO, "gloo", "cpu", 2, "gloo"),
        (ALONE, "nccl", "gpu", 1, "nccl"),
        (ALONE, "nccl", "cpu", 1, "NVIDIA"),
        (Topology(backend="gloo"), "gloo", "gpu", 1, "gpu.* CPU"),
        (TWO, "gloo", "cpu", 1, "WORLD_SIZE=2"),
    ],
)
def test_a_jax_that_started_elsewhere_is_refused(topology, chosen, started, processes, got):
    if got in ("gpu", "tpu", "gloo", "nccl"):
        assert check_started(topology, chosen, started, processes) == got
    else:
        with pytest.raises(GroupError, match=got):
            check_started(topology, chosen, started, processes)


MANY = Topology(world_size=8192, local_world_size=4096)


@pytest.mark.parametrize(
    ("layout", "lines"),
    [(("gloo", MANY), 1), (("nccl", MANY), 0), (("gloo", ALONE), 0)],
)
def test_more_processes_than_cores_are_said(layout, lines):
    assert len(advice(*layout)) == lines


@pytest.mark.parametrize(
    ("gpus", "local_rank", "here", "got"),
    [
        (["3"], 5, 8, None),  # one visible: it is ours for any LOCAL_RANK
        (["0", "1", "2", "3"], 0, 1, None),  # one process per host keeps all
        (["0", "1", "2", "3"], 1, 2, [2, 3]),
        (["0", "1"], 1, 0, [1]),  # unknown number of ranks here: one each
        ([], 0, 2, None),
    ],
)
def test_devices_of_a_local_rank(gpus, local_rank, here, got):
    assert local_devices(gpus, local_rank, here) == got


@pytest.mark.parametrize(
    ("gpus", "local_rank", "here", "limited", "message"),
    [
        (["0", "1"], 2, 3, True, "LOCAL_RANK=2 .*3 .* 0, 1"),
        # Two processes on one H100: NCCL ends with "Duplicate GPU detected" in ten lines of XLA's.
        (["0"], 0, 2, False, "LOCAL_RANK=0 .*2 "),
    ],
)
def test_more_processes_than_gpus(gpus, local_rank, here, limited, message):
    with pytest.raises(ConfigError, match=message):
        local_devices(gpus, local_rank, here, limited=limited)


@pytest.mark.parametrize(("backend", "platforms"), [("cpu", "cpu"), ("auto", "None")])
def test_a_jax_loaded_before_the_group_takes_the_cpu_only_where_it_was_asked_for(backend, platforms):
    """jax reads JAX_PLATFORMS at import: it would start on a GPU, or not on a TPU."""
    code = "import jax, cyxjax as cx; cx.distributed.init(); print(jax.config.jax_platforms)"
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = forked.run(["-c", code], env | {"DISTRIBUTED_BACKEND": backend}, 120)  # with jax loaded
    assert done.stdout.split()[-1:] == [platforms], done.stderr


@pytest.mark.parametrize(("backend", "wanted"), [("auto", None), ("gloo", "cpu"), ("cpu", "cpu")])
def test_the_platform_is_set_only_where_the_cpu_was_asked_for(backend, wanted):
    assert prepared(Topology(backend=backend)).get("JAX_PLATFORMS") == wanted


def test_what_is_missing_is_written_and_what_the_user_set_stays():
    env = prepared()
    assert env["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] == "gloo"
    assert "--xla_cpu_collective_timeout_seconds=600" in env["XLA_FLAGS"].split()
    assert env["NPROC"] == env["OMP_NUM_THREADS"] == str(thread_share(2))
    mine = {"NPROC": "3", "OMP_NUM_THREADS": "4", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}
    env = prepared(**mine, XLA_FLAGS="--xla_cpu_collective_timeout_seconds=7 --other")
    assert {name: env[name] for name in mine} == mine
    assert env["XLA_FLAGS"].split()[:2] == ["--xla_cpu_collective_timeout_seconds=7", "--other"]
    assert env["XLA_FLAGS"].count("xla_cpu_collective_timeout") == 1
    assert add_flags("--a=1  --b", {"--a": 2, "--c": 3}) == "--a=1 --b --c=3"


def test_threads_are_shared_out_and_several_cpu_devices_get_one_each(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [thread_share(n) for n in (0, 1, 3, 16)] == [8, 8, 2, 1]
    assert prepared(JAX_NUM_CPU_DEVICES="64")["NPROC"] == "64"
    assert prepared(JAX_NUM_CPU_DEVICES="64", NPROC="1", CYXJAX_NPROC="1")["NPROC"] == "64"  # a launcher's
    assert pool_threads(8, {"NPROC": "2"}) == 8


def test_the_coordinator_is_not_dialled_through_a_proxy():
    place = Topology(rank=1, world_size=2, master_addr="10.0.0.1")
    env = prepared(place, http_proxy="http://proxy:3128", no_proxy="internal")
    assert set(env["no_grpc_proxy"].split(",")) == {"internal", "10.0.0.1", "127.0.0.1"}
    assert (env["http_proxy"], env["no_proxy"]) == ("http://proxy:3128", "internal")
    assert "no_grpc_proxy" not in prepared()


def test_nccl_s_timeout_is_honoured():
    assert collective_timeout_s({"NCCL_TIMEOUT": "1800"}) == 1800
    assert collective_timeout_s({}, timeout_ms=900_000) == 900
    with pytest.raises(ConfigError, match="NCCL_TIMEOUT"):
        collective_timeout_s({"NCCL_TIMEOUT": "long"})


def test_a_longer_wait_for_the_group_to_form_does_not_shorten_its_collectives(monkeypatch):
    waits = []
    monkeypatch.setattr(
        Peers, "exchange", lambda self, text, timeout_s, what: waits.append(timeout_s) or [text]
    )
    for timeout_ms in (30_000, 35_000, 900_000):
        agree(ProcessGroup(Topology(0, 2, timeout_ms=timeout_ms), "gloo", None), "barrier")
    assert waits == [600, 600, 900]


@pytest.mark.parametrize("local_world_size", [1, 2])
def test_an_exact_run_has_its_own_number_of_threads_in_every_process(monkeypatch, local_world_size):
    # the launcher's share is ours to change; two ranks with one device each get what one rank would
    place = Topology(0, local_world_size, local_world_size=local_world_size, backend="nccl")
    with pytest.raises(ConfigError, match="NPROC=3 .* 8 CPU threads.*exact_threads"):
        prepared(place, threads=8, NPROC="3")
    assert prepared(place, threads=3, NPROC="3")["NPROC"] == "3"  # the same number is no conflict
    jax.devices()
    with pytest.raises(GroupError, match=r"threads=8.*init\(\)"):
        prepared(place, threads=8)
    monkeypatch.setattr(jax_private, "backend_runs", lambda: False)
    env = prepared(place, threads=8, NPROC="1", CYXJAX_NPROC="1")
    assert (env["NPROC"], pool_threads(1, env)) == ("8", 8)


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (TPU_VM, (0, 1)),
        (SLICE, (2, 4)),
        (SLICES, (6, 8)),
        (SLICE | {"JOB_COMPLETION_INDEX": "2"}, (2, 4)),  # of a Job that GKE starts on each host
        (SLICE | {"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        (SLICE | {"JAX_PLATFORMS": "cpu"}, (0, 1)),
        (SLICE | {"DISTRIBUTED_BACKEND": "cpu"}, (0, 1)),
    ],
)
def test_a_slice_has_a_process_a_host(env, place):
    found = discover(env)
    assert (found.rank, found.world_size) == place
    # With an explicit rank our own group is used, without jax's cluster detection.
    assert (found.source == TPU_SLICE) == (place[1] > 1 and "RANK" not in env)


def test_on_a_slice_jax_forms_the_group_by_itself(monkeypatch):
    called = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *args, **options: called.append((args, options)))
    monkeypatch.setattr(jax_private, "refuse_started_backend", lambda backend: None)
    monkeypatch.setattr(connecting.exits, "install", lambda rank, start, env: called.append(rank))
    monkeypatch.setattr(connecting.client, "join", lambda *args: pytest.fail("no server of ours is there"))
    connecting.connect(discover(SLICE), env={})
    assert called == [2, ((), {})]
    assert "XLA_FLAGS" not in prepared(discover(SLICE))  # flags of CPUs and GPUs
