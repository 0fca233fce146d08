"""Hosts with a TPU, an AMD GPU or Metal: told so, or trained on their CPU because it was asked for."""

import subprocess
import sys

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch.backend import platforms
from cyxjax.launch.backend.accelerators import _TPU_DEVICES, found
from cyxjax.launch.backend.platforms import check_started, idle_accelerators, settle
from cyxjax.launch.environment import prepare
from cyxjax.launch.topology import Topology

ALONE, TWO = Topology(), Topology(rank=1, world_size=2, local_world_size=2)


@pytest.fixture(autouse=True)
def no_word_to_jax(monkeypatch):
    monkeypatch.setattr(platforms, "_told_to_jax", lambda: "")  # these tests' own jax was told the CPU


def host(root, *files, **texts):
    """A root folder with these files in it; texts: path with __ for / -> content."""
    wanted = dict.fromkeys(files, "") | {name.replace("__", "/"): text for name, text in texts.items()}
    for name, text in wanted.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def tpu_by_pci(root):
    return host(
        root,
        sys__bus__pci__devices__5__vendor="0x1ae0\n",
        sys__bus__pci__devices__5__device="0x0063\n",
        sys__bus__pci__devices__6__vendor="0x1ae0\n",
        sys__bus__pci__devices__6__device="0x0042\n",
    )


def amd(root, simd="simd_count 304"):
    nodes = "sys/class/kfd/kfd/topology/nodes"
    host(root, "dev/kfd", **{f"{nodes}/0/properties": "cpu_cores_count 8\nsimd_count 0\n"})
    return host(root, **{f"{nodes}/1/properties": f"cpu_cores_count 0\n{simd}\n"})


def has(*packages):
    return lambda name: name in packages


HOSTS = {
    "tpu v3": (lambda root: host(root, "dev/accel0"), has(), "TPU", "/dev/accel0"),
    "tpu v5e by pci": (tpu_by_pci, has(), "TPU", "/sys/bus/pci/devices/5"),
    "tpu v5e by vfio": (lambda root: host(root, "dev/vfio/0"), has("libtpu"), "TPU", "/dev/vfio/0"),
    "rocm": (amd, has("jax_plugins.rocm"), "AMD GPU", "/dev/kfd"),
    "metal": (lambda root: host(root), has("jax_plugins.metal"), "Apple GPU", "the package jax-metal"),
}
PLAIN = {
    "nothing": lambda root: host(root, "dev/null"),
    "no folders": lambda root: str(root / "none"),
    "passed through, not a tpu": lambda root: host(root, "dev/vfio/0", "dev/vfio/vfio"),
    "an npu": lambda root: host(root, "dev/accel/accel0"),
    "google's network card": lambda root: host(
        root, sys__bus__pci__devices__6__vendor="0x1ae0", sys__bus__pci__devices__6__device="0x0042"
    ),
    "kfd without a gpu": lambda root: amd(root, "simd_count 0"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_an_accelerator_that_is_not_trained_on_is_named(name, tmp_path):
    make, installed, kind, sign = HOSTS[name]
    root = make(tmp_path)
    for topology in (ALONE, TWO):
        with pytest.raises(GroupError, match=f"has a {kind} .{sign}.*HINT: set DISTRIBUTED_BACKEND=cpu"):
            settle(topology, {}, root, installed)
    assert settle(Topology(backend="cpu"), {}, root, installed) == "gloo"
    assert settle(TWO, {"JAX_PLATFORMS": "cpu"}, root, installed) == "gloo"
    platform = found(root, installed)[0].platform
    assert settle(ALONE, {"JAX_PLATFORMS": platform}, root, installed) == "gloo"
    with pytest.raises(GroupError, match="does not train on yet"):
        settle(TWO, {"JAX_PLATFORMS": platform}, root, installed)


@pytest.mark.parametrize("name", PLAIN)
def test_other_hosts_train_on_their_cpu(name, tmp_path):
    root = PLAIN[name](tmp_path)
    assert found(root, has()) == []
    assert settle(TWO, {}, root, has()) == "gloo"


def test_a_host_of_a_pod_does_not_train_alone(tmp_path):
    env = {"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}
    with pytest.raises(GroupError, match="has a TPU"):
        settle(ALONE, env, host(tmp_path, "dev/accel0"), has())


def test_an_nvidia_gpu_comes_first_unless_jax_is_told_the_cpu(tmp_path):
    root = host(tmp_path, "dev/nvidia0", "dev/kfd")
    assert settle(ALONE, {}, root, has()) == "nccl"
    assert settle(ALONE, {"JAX_PLATFORMS": "cpu"}, root, has()) == "gloo"


def test_an_amd_gpu_without_a_plugin_is_a_line_not_an_error(tmp_path):
    root = amd(tmp_path)
    assert settle(ALONE, {}, root, has()) == "gloo"
    (line,) = idle_accelerators("gloo", "auto", {}, root)
    assert "AMD GPU (/dev/kfd), but jax no plugin for it: training on the CPU" in line
    assert idle_accelerators("gloo", "gloo", {}, root) == []
    assert idle_accelerators("gloo", "auto", {"JAX_PLATFORMS": "cpu"}, root) == []


def test_the_platform_is_set_only_where_the_cpu_was_asked_for():
    for asked, wanted in (("auto", None), ("gloo", "cpu"), (None, "cpu")):
        env = {}
        prepare(Topology(backend="gloo"), env=env, asked=asked)
        assert env.get("JAX_PLATFORMS") == wanted


@pytest.mark.parametrize(
    ("topology", "chosen", "started", "said"),
    [
        (ALONE, "nccl", "cpu", "has an NVIDIA GPU, but jax started on the CPU. HINT: pip install"),
        (TWO, "gloo", "tpu", "jax started on tpu; this group of 2 is to train on the CPU"),
        (Topology(backend="gloo"), "gloo", "gpu", "HINT: set JAX_PLATFORMS=cpu"),
    ],
)
def test_a_jax_that_started_elsewhere_is_told(topology, chosen, started, said):
    with pytest.raises(GroupError, match=said):
        check_started(topology, chosen, started, {})


@pytest.mark.parametrize(("chosen", "started"), [("nccl", "gpu"), ("gloo", "cpu"), ("gloo", "tpu")])
def test_what_started_as_chosen_or_as_jax_found_it_alone(chosen, started):
    check_started(ALONE, chosen, started, {})


def test_tpus_are_known_as_jax_knows_them():
    from jax._src import hardware_utils

    assert set(hardware_utils._TPU_PCI_DEVICE_IDS) <= _TPU_DEVICES


PROGRAM = """
import os, sys
from cyxjax.launch.backend import accelerators
look = accelerators.found
accelerators.found = lambda root="/", has=accelerators.installed: look(sys.argv[1], has)
import cyxjax as cx
cx.distributed.init()
import jax
print(jax.devices()[0].platform, os.environ.get("JAX_PLATFORMS"))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({}, 1, "GroupError: this host has a TPU (/dev/accel0), which cyxjax does not train on yet"),
        ({"DISTRIBUTED_BACKEND": "cpu"}, 0, "cpu cpu"),
    ],
)
def test_a_real_process_on_a_tpu_host(tmp_path, monkeypatch, variables, code, said):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", PROGRAM, host(tmp_path, "dev/accel0")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.multiprocess
def test_a_real_process_without_any_leaves_the_platform_to_jax(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[1] == "None"
