"""Two hosts as two network namespaces with their own names and addresses, joined by one wire."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cyxjax.cli.audit import main as audit
from cyxjax.errors import EXIT_PREEMPTED
from tests.support.launching import RANK, Ear, processes_with, until
from tests.support.training import newest_step, write_experiment

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

    def launch(
        self,
        host: int,
        log_dir: Path,
        *flags: str,
        nnodes: str = "2",
        program: Sequence[str] = (),
        **env: object,
    ) -> subprocess.Popen:
        """A launcher with one rank on `host`, in a host name of its own; runs rank.py, or `program`."""
        place = ["--node-rank", str(host)] if host == 0 or nnodes == "2" else []
        words = ["--nnodes", nnodes, *place, "--master-addr", "10.77.0.1", "--master-port", "29501"]
        words += ["--run-id", self.run_id, "--log-dir", str(log_dir / str(host)), *flags]
        words += program or [str(RANK)]
        inside = f'hostname host-{host} && exec "$0" -m cyxjax.launch "$@"'
        named = ["unshare", "--uts", "sh", "-c", inside, sys.executable, *words]
        clean = {k: v for k, v in os.environ.items() if k != "NPROC"}
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
        pytest.skip("network namespaces need root; run this test as root")
    if not all(shutil.which(name) for name in ("ip", "unshare")):
        pytest.skip("ip or unshare is not installed: apt-get install iproute2 util-linux")
    tag = secrets.token_hex(3)
    spaces = (f"cyx{tag}a", f"cyx{tag}b")
    if ip("netns", "add", spaces[0], check=False).returncode != 0:
        pytest.skip("network namespaces are not allowed here: CAP_SYS_ADMIN is needed")
    try:
        ip("netns", "add", spaces[1])
        veth = ["wire0", "type", "veth", "peer", "name", "wire1", "netns", spaces[1]]
        ip("-n", spaces[0], "link", "add", *veth)
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


def test_a_mended_wire_lets_both_go_on(wire, tmp_path):
    env = {"STEPS": 4000, "STEP_S": 0.1, "UNTIL": tmp_path / "enough"}
    launchers = [wire.launch(host, tmp_path, "--max-restarts", "3", **env) for host in range(2)]
    assert until(lambda: all("under way" in lines_of(tmp_path, k, 0) for k in range(2)), 90)
    wire.cut()
    heard = [Ear(launcher.stderr) for launcher in launchers]
    assert heard[0].hears("host host-1 is gone; restart 1 of 3")
    assert heard[1].hears("trying to reach it again")
    wire.mend()
    assert until(lambda: in_step(tmp_path, 1), 90)
    (tmp_path / "enough").touch()  # of the start that is under way, or the one after it
    for code, out, err in ends(launchers, 180):
        assert code == 0, err
        assert "finished" in out


def lines_of(log_dir: Path, host: int, start: int) -> str:
    return "".join(log.read_text() for log in (log_dir / str(host)).glob(f"start_{start}/rank_*.log"))


def test_the_trainer_goes_on_alone_behind_a_cut_wire_and_with_the_same_host_once_it_is_mended(wire, tmp_path):
    config = write_experiment(tmp_path, cpu_devices=1, epochs=100_000, checkpoint_every_n_steps=50)
    program = ["-m", "cyxjax.train", "--config", str(config)]
    launchers = [wire.launch(host, tmp_path, nnodes="1:2", program=program) for host in range(2)]
    assert until(lambda: newest_step(config) >= 100, 90)
    wire.cut()
    assert until(lambda: "Resuming from step" in lines_of(tmp_path, 0, 1), 90)
    wire.mend()
    assert until(lambda: "Resuming from step" in lines_of(tmp_path, 0, 2), 90)
    together_at = newest_step(config)
    assert until(lambda: newest_step(config) >= together_at + 100, 90)
    launchers[0].send_signal(signal.SIGTERM)
    (code0, out0, err0), (code1, _, err1) = ends(launchers)
    assert (code0, code1) == (EXIT_PREEMPTED, EXIT_PREEMPTED), (err0, err1)
    assert "Stopped and saved after step" in out0
    assert "trying to reach it again" in err1
    assert "the first host leaves" in err1
    for start, hosts in enumerate(("2 host(s), 2 rank(s)", "1 host(s), 1 rank(s)", "2 host(s), 2 rank(s)")):
        assert f"start {start}: {hosts}" in err0
    assert audit([str(tmp_path / "run")]) == 0
