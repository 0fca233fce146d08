"""Which platform a run takes: the CPU if asked for, NVIDIA GPUs, TPU slices, or what jax finds."""

import pytest

from cyxjax.errors import ConfigError, GroupError
from cyxjax.launch import connect as connecting
from cyxjax.launch.backend import jax_private, platforms
from cyxjax.launch.backend.platforms import check_started, settle, untried
from cyxjax.launch.clusters import discover
from cyxjax.launch.environment import prepare
from cyxjax.launch.topology import TPU_SLICE, Topology

ALONE, TWO = Topology(), Topology(rank=1, world_size=2, local_world_size=2)
CPUS = Topology(world_size=2, backend="gloo")
# What Google's documentation and jax's cluster detection name, for a v5litepod-16 of four hosts.
TPU_VM = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
SLICE = TPU_VM | {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3"}
SLICES = SLICE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


@pytest.fixture(autouse=True)
def no_word_to_jax(monkeypatch):
    monkeypatch.setattr(platforms, "_told_to_jax", lambda: "")  # these tests' own jax was told the CPU


def host(root, *files):
    """A root folder with these empty files in it."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return str(root)


@pytest.mark.parametrize("env", [{}, {"JAX_PLATFORMS": "tpu"}, {"JAX_PLATFORMS": "rocm,cpu"}])
def test_without_an_nvidia_gpu_the_platform_is_left_to_jax(tmp_path, env):
    for topology in (ALONE, TWO):
        assert settle(topology, env, host(tmp_path, "dev/accel0", "dev/kfd")) == "gloo"


def test_an_nvidia_gpu_comes_first_unless_jax_is_told_the_cpu(tmp_path):
    root = host(tmp_path, "dev/nvidia0", "dev/kfd")
    assert settle(ALONE, {}, root) == "nccl"
    assert settle(ALONE, {"JAX_PLATFORMS": "cpu"}, root) == "gloo"
    assert settle(ALONE, {"JAX_PLATFORMS": "cuda"}, root) == "nccl"


def test_cuda_without_a_gpu_is_a_wrong_environment(tmp_path):
    with pytest.raises(ConfigError, match="JAX_PLATFORMS"):
        settle(ALONE, {"JAX_PLATFORMS": "cuda"}, str(tmp_path))


def test_the_platform_is_set_only_where_the_cpu_was_asked_for():
    for asked, wanted in (("auto", None), ("gloo", "cpu"), (None, "cpu")):
        env = {}
        prepare(Topology(backend="gloo"), env=env, asked=asked)
        assert env.get("JAX_PLATFORMS") == wanted


@pytest.mark.parametrize(
    ("topology", "chosen", "started", "processes", "names"),
    [
        (ALONE, "nccl", "cpu", 1, "NVIDIA"),
        (CPUS, "gloo", "tpu", 2, "tpu"),
        (Topology(backend="gloo"), "gloo", "gpu", 1, "gpu"),
        (ALONE, "gloo", "tpu", 4, "WORLD_SIZE=1"),  # one host of a slice that nobody named
        (TWO, "gloo", "cpu", 1, "WORLD_SIZE=2"),
    ],
)
def test_a_jax_that_started_elsewhere_is_refused(topology, chosen, started, processes, names):
    with pytest.raises(GroupError, match=names):
        check_started(topology, chosen, started, processes, {})


@pytest.mark.parametrize(
    ("topology", "chosen", "started", "backend"),
    [
        (ALONE, "nccl", "gpu", "nccl"),
        (ALONE, "gloo", "cpu", "gloo"),
        (ALONE, "gloo", "tpu", "tpu"),
        (TWO, "gloo", "tpu", "tpu"),
    ],
)
def test_the_backend_is_what_jax_started_and_an_untried_one_is_said(topology, chosen, started, backend):
    assert check_started(topology, chosen, started, topology.world_size, {}) == backend
    assert [backend in line for line in untried(backend)] == [True] * (backend == "tpu")


def test_a_tpu_vm_is_one_process():
    assert discover(TPU_VM).world_size == 1


@pytest.mark.parametrize(
    ("env", "place"),
    [
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
    # Who names the place by hand gets our own group, which jax's detection has no part in.
    assert (found.source == TPU_SLICE) == (place[1] > 1 and "RANK" not in env)


def test_a_slice_that_two_sources_count_differently_is_refused():
    with pytest.raises(ConfigError, match="TPU_WORKER_ID=2"):
        discover(SLICE | {"RANK": "0", "WORLD_SIZE": "2"})


def test_on_a_slice_jax_forms_the_group_by_itself(monkeypatch):
    called = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *args, **options: called.append((args, options)))
    monkeypatch.setattr(jax_private, "refuse_started_backend", lambda: None)
    monkeypatch.setattr(connecting.exits, "install", lambda rank, start, env: called.append(rank))
    monkeypatch.setattr(connecting.client, "join", lambda *args: pytest.fail("no server of ours is there"))
    connecting.connect(discover(SLICE), env={})
    assert called == [2, ((), {})]
    env = {}
    prepare(discover(SLICE), env=env, asked="auto")
    assert "XLA_FLAGS" not in env  # flags of CPUs and GPUs
