"""Two hosts as two network namespaces with their own names and addresses, joined by one wire."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cyxjax.errors import EXIT_SECONDARY
from tests.faults.launching import RANK, processes_with, until

pytestmark = [pytest.mark.multiprocess, pytest.mark.root, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=20)


@dataclass
class Wire:
    """The namespaces' names; host k has the address 10.77.0.(k + 1) and is called host-k."""

    spaces: tuple[str, str]
    run_id: str

    def cut(self) -> None:
        ip("-n", self.spaces[1], "link", "set", "wire1", "down")

    def mend(self) -> None:
        ip("-n", self.spaces[1], "link", "set", "wire1", "up")

    def launch(self, host: int, log_dir: Path, *flags: str, **env: object) -> subprocess.Popen:
        """A launcher with one rank on `host`, in a host name of its own."""
        words = [
            "--nnodes",
            "2",
            "--node-rank",
            str(host),
            "--master-addr",
            "10.77.0.1",
            "--master-port",
            "29501",
        ]
        words += ["--run-id", self.run_id, "--log-dir", str(log_dir / str(host)), *flags, str(RANK)]
        inside = f'hostname host-{host} && exec "$0" -m cyxjax.launch "$@"'
        named = ["unshare", "--uts", "sh", "-c", inside, sys.executable, *words]
        clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
        base = {"JAX_PLATFORMS": "cpu", "KIND": "jax", "PYTHONPATH": str(ROOT), "CYXJAX_TOKEN": "t" * 64}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.spaces[host], *named],
            env=clean | base | {"DISTRIBUTED_TIMEOUT_MS": "60000"} | {k: str(v) for k, v in env.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def wire():
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not all(shutil.which(name) for name in ("ip", "unshare")):
        pytest.skip("ip or unshare is not installed: apt-get install iproute2 util-linux")
    tag = secrets.token_hex(3)
    spaces = (f"cyx{tag}a", f"cyx{tag}b")
    if ip("netns", "add", spaces[0], check=False).returncode != 0:
        pytest.skip("this kernel or container does not allow network namespaces")
    try:
        ip("netns", "add", spaces[1])
        ip(
            "-n",
            spaces[0],
            "link",
            "add",
            "wire0",
            "type",
            "veth",
            "peer",
            "name",
            "wire1",
            "netns",
            spaces[1],
        )
        for k, space in enumerate(spaces):
            ip("-n", space, "addr", "add", f"10.77.0.{k + 1}/24", "dev", f"wire{k}")
            ip("-n", space, "link", "set", f"wire{k}", "up")
            ip("-n", space, "link", "set", "lo", "up")
        wire = Wire(spaces, f"hosts-{tag}")
        yield wire
        for pid in processes_with(f"CYXJAX_RUN_ID={wire.run_id}".encode()):
            os.kill(pid, signal.SIGKILL)
    finally:
        for space in spaces:
            ip("netns", "del", space, check=False)


def ends(launchers, limit_s=120):
    """(exit code, stdout, stderr) of each."""
    said = []
    try:
        for launcher in launchers:
            out, err = launcher.communicate(timeout=limit_s)
            said.append((launcher.returncode, out, err))
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.communicate()
    return said


def in_step(log_dir: Path, start: int = 0) -> bool:
    return all((log_dir / str(k) / f"start_{start}" / f"rank_{k}.log").exists() for k in range(2))


def test_two_hosts_train_together(wire, tmp_path):
    said = ends([wire.launch(host, tmp_path) for host in range(2)])
    for code, out, err in said:
        assert code == 0, err
        assert "finished 8 steps, start 0, total 2" in out


def test_a_death_on_one_host_is_told_on_the_other(wire, tmp_path):
    said = ends([wire.launch(host, tmp_path, FAULT="raise:1:3", STEPS=400) for host in range(2)])
    (code0, _, err0), (code1, _, err1) = said
    assert (code0, code1) == (EXIT_SECONDARY, 1), (err0, err1)
    assert "rank 0 could not go on after a failure elsewhere" in err0
    assert "lost rank 1 (host host-1): ValueError: boom" in err0
    assert err1.rstrip().endswith("ValueError: boom, api_key=[redacted]")


def test_a_host_that_never_comes_is_named(wire, tmp_path):
    ((code, _, err),) = ends([wire.launch(0, tmp_path, DISTRIBUTED_TIMEOUT_MS=2000)])
    assert code == 1
    assert "Timeout waiting for peers: rank 1 (never seen)" in err
    assert "rank 0 on host-0" in err


def test_a_cut_wire_ends_both_sides_in_bounded_time(wire, tmp_path):
    launchers = [wire.launch(host, tmp_path, STEPS=4000) for host in range(2)]
    assert until(lambda: in_step(tmp_path), 30)
    time.sleep(6)
    wire.cut()
    began = time.monotonic()
    (code0, _, err0), (code1, _, err1) = ends(launchers)
    assert (code0, code1) == (EXIT_SECONDARY, EXIT_SECONDARY), (err0, err1)
    assert time.monotonic() - began < 60
    assert "lost rank 1 (host host-1)" in err0
    assert "10.77.0.1:29501 is gone" in err1


def test_a_mended_wire_lets_both_go_on(wire, tmp_path):
    env = {"STEPS": 150, "STEP_S": 0.1}
    launchers = [wire.launch(host, tmp_path, "--max-restarts", "3", **env) for host in range(2)]
    assert until(lambda: in_step(tmp_path), 30)
    time.sleep(6)
    wire.cut()
    assert until(lambda: in_step(tmp_path, 1), 60)  # both have noticed, and started again
    wire.mend()
    for code, out, err in ends(launchers, 180):
        assert code == 0, err
        assert "finished 150 steps" in out
