"""Two hosts: network namespaces with their own names and addresses, connected by one link."""

import secrets
import shutil
import signal
import subprocess
from contextlib import ExitStack, closing
from typing import NamedTuple

import pytest

from cyxjax.cli.audit import main as audit
from cyxjax.errors import EXIT_PREEMPTED
from tests.support.elastic_hosts import Hosts, says
from tests.support.launching import until
from tests.support.training import newest_step, write_experiment

pytestmark = [pytest.mark.multiprocess, pytest.mark.root, pytest.mark.slow]


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=20)


class Wire(NamedTuple):
    """Two namespaces; host k has the address 10.77.0.(k + 1) and is called host-k."""

    spaces: tuple[str, str]

    def set(self, state: str) -> None:
        """Sets the link "down" or "up"."""
        ip("-n", self.spaces[1], "link", "set", "wire1", state)

    def words(self, host: int) -> tuple[str, ...]:
        """Prefix of a command that runs on `host`."""
        inside = f'hostname host-{host} && exec "$0" "$@"'
        return ("ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c", inside)


@pytest.fixture
def wire():
    if not all(shutil.which(name) for name in ("ip", "unshare")):
        pytest.skip("ip or unshare is not installed: apt-get install iproute2 util-linux")
    tag = secrets.token_hex(3)
    spaces = (f"cyx{tag}a", f"cyx{tag}b")
    if ip("netns", "add", spaces[0], check=False).returncode != 0:
        pytest.skip("network namespaces are not allowed here: root or CAP_SYS_ADMIN is needed")
    with ExitStack() as stack:
        for space in spaces:
            stack.callback(ip, "netns", "del", space, check=False)
        ip("netns", "add", spaces[1])
        veth = ["wire0", "type", "veth", "peer", "name", "wire1", "netns", spaces[1]]
        ip("-n", spaces[0], "link", "add", *veth)
        for k, space in enumerate(spaces):
            ip("-n", space, "addr", "add", f"10.77.0.{k + 1}/24", "dev", f"wire{k}")
            ip("-n", space, "link", "set", f"wire{k}", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield Wire(spaces)


def test_behind_a_cut_wire_a_job_waits_or_goes_on_alone_and_both_go_on_once_it_is_mended(wire, tmp_path):
    config = write_experiment(tmp_path, cpu_devices=1, epochs=100_000, checkpoint_every_n_steps=50)
    train = ("-m", "cyxjax.train", "--config", str(config))
    place = {"address": "10.77.0.1", "DISTRIBUTED_TIMEOUT_MS": 60_000}
    with (
        closing(Hosts(tmp_path / "fixed", "2", KIND="jax", STEP_S=0.1, **place)) as fixed,
        closing(Hosts(tmp_path / "elastic", "1:2", *train, **place)) as elastic,
    ):
        for host in range(2):
            fixed.add("--max-restarts", "3", wrap=wire.words(host))
            elastic.add(wrap=wire.words(host))
        fixed.wait_for_start(0)
        assert until(lambda: newest_step(config) >= 100, 90)
        wire.set("down")
        first, second = fixed.runs
        assert first.logged("host host-1 is gone; restart 1 of 3")
        assert second.logged("trying to reach it again")
        alone, other = elastic.runs
        assert until(lambda: says(alone, 1, "Resuming from step"), 90)
        wire.set("up")
        assert until(lambda: all(says(run, 1, "") for run in fixed.runs), 90)
        fixed.end()  # in the current start or the next one
        assert all("finished" in run.out for run in fixed.runs)
        assert until(lambda: says(alone, 2, "Resuming from step"), 90)
        together_at = newest_step(config)
        assert until(lambda: newest_step(config) >= together_at + 100, 90)
        alone.process.send_signal(signal.SIGTERM)
        assert (alone.wait().code, other.wait().code) == (EXIT_PREEMPTED, EXIT_PREEMPTED), other.err
    assert "Stopped and saved after step" in alone.out
    assert "trying to reach it again" in other.err
    assert "the first host leaves" in other.err
    for start, hosts in enumerate(("2 host(s), 2 rank(s)", "1 host(s), 1 rank(s)", "2 host(s), 2 rank(s)")):
        assert f"start {start}: {hosts}" in alone.err
    assert audit([str(tmp_path / "run")]) == 0
