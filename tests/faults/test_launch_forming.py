"""Faults while a group forms, without a launcher: ranks started by hand, as on hosts of one's own.

Rows R17-R25 and R42 of the project's fault table. Most need no jax: they end before it is loaded.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from cyxjax.errors import EXIT_CONFIG
from cyxjax.launch.group import ports
from tests.support import forked
from tests.support.launching import RANK, until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def group():
    """Starts ranks by hand at one free port; afterwards none is alive."""
    with contextlib.ExitStack() as stack:
        with ports.listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]

        def rank(number, world_size=2, **env):
            place = {
                "RANK": number,
                "WORLD_SIZE": world_size,
                "MASTER_PORT": port,
                "KIND": "light",
                "STEPS": 3,
            }
            place |= {"DISTRIBUTED_TIMEOUT_MS": 8000, "JAX_PLATFORMS": "cpu", **env}
            given = {name: str(value) for name, value in place.items() if value is not None}
            process = forked.Program([RANK], _clean() | given)
            stack.callback(process.end)
            return process

        rank.port = port
        yield rank


def _clean():
    return {k: v for k, v in os.environ.items() if k != "NPROC"}


def outcome(process, limit_s=90):
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


def connected(process, port):
    """True while `process` holds a connection to `port`."""
    held = psutil.Process(process.pid).net_connections("tcp")
    return any(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port for one in held)


def test_r17_a_rank_that_never_starts_is_named(group):
    code, _, err = outcome(group(0, 3, KIND="jax", DISTRIBUTED_TIMEOUT_MS=1000))
    assert code == 1
    assert "Timeout waiting for peers: ranks 1, 2 after 1 s; here: rank 0" in err
    assert "Traceback" not in err


def test_r17_without_rank_0_the_connection_is_refused(group):
    code, _, err = outcome(group(1, DISTRIBUTED_TIMEOUT_MS=500))
    assert code == 1
    assert f"Connection refused to 127.0.0.1:{group.port}" in err


def test_r18_a_late_rank_is_waited_for(group):
    early = group(1, KIND="jax", DISTRIBUTED_TIMEOUT_MS=60_000)
    time.sleep(1)  # how late rank 0 is: most of this goes by after rank 1 has found nobody
    for process in [group(0, KIND="jax", DISTRIBUTED_TIMEOUT_MS=60_000), early]:
        assert outcome(process)[0] == 0


def test_r19_another_world_size_is_refused_on_both_sides(group):
    first, second = group(0, 3, KIND="jax"), group(1, 2)
    said = [outcome(process)[2] for process in (first, second)]
    assert all("ranks differ in WORLD_SIZE: 2 on rank 1, 3 on the others" in err for err in said)


@pytest.mark.parametrize("token", ["right", "wrong"])
def test_r20_a_second_rank_1_is_refused_and_the_job_untouched(group, tmp_path, token):
    env = {"CYXJAX_TOKEN": "right", "DISTRIBUTED_TIMEOUT_MS": 60_000}
    env |= {"STEPS": 4000, "UNTIL": tmp_path / "refused"}
    job = [group(rank, KIND="jax", **env) for rank in range(2)]
    assert all(process.hears("under way") for process in job)
    code, _, err = outcome(group(1, CYXJAX_TOKEN=token))
    assert code == 1
    assert ("RANK=1 is taken" if token == "right" else "wrong or missing job token") in err
    (tmp_path / "refused").touch()
    for process in job:
        code, out, err = outcome(process)
        assert (code, "finished" in out) == (0, True), err


BAD = [
    ({"RANK": "5"}, r"RANK=5 is outside"),
    ({"RANK": "one"}, "RANK='one'"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE missing"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
    ({"DISTRIBUTED_BACKEND": "carrier pigeon"}, "DISTRIBUTED_BACKEND='carrier pigeon'"),
]


@pytest.mark.parametrize(("env", "said"), BAD)
def test_r21_a_bad_environment_ends_at_once_with_one_line(env, said):
    code = (
        "import os, sys\n"
        "from cyxjax.errors import ConfigError\n"
        "from cyxjax.launch.clusters import discover\n"
        "try: discover(os.environ)\n"
        "except ConfigError as error: print(error); sys.exit(2 if 'jax' not in sys.modules else 9)\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "2", **env}
    full = _clean() | {name: value for name, value in place.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=30)
    assert done.returncode == EXIT_CONFIG
    assert said in done.stdout
    assert done.stdout.count("\n") == 1


def test_r22_a_port_in_use_is_refused_by_name_every_time(group):
    with socket.create_server(("127.0.0.1", group.port)):
        for process in [group(0, KIND="jax") for _ in range(4)]:
            code, _, err = outcome(process)
            assert code == 1, (code, err)  # never a segmentation fault
            assert f"Port {group.port} on 127.0.0.1 is in use by" in err
            assert f"pid {os.getpid()}" in err


def test_r22_a_sharing_listener_on_ipv6_is_no_way_around(group):
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("::", group.port))
        other.listen()
        assert "is in use by" in outcome(group(0, KIND="jax"))[2]


def test_r22_two_jobs_on_one_port_do_not_meet(group, tmp_path):
    env = {"DISTRIBUTED_TIMEOUT_MS": 60_000, "STEPS": 4000, "UNTIL": tmp_path / "refused"}
    first = [group(rank, KIND="jax", CYXJAX_RUN_ID="first", **env) for rank in range(2)]
    assert all(process.hears("under way") for process in first)
    second = [group(rank, KIND="jax", CYXJAX_RUN_ID="second", **env) for rank in range(2)]
    said = [outcome(process)[2] for process in second]
    assert "is in use by" in said[0]
    assert "belongs to job 'first'" in said[1]
    (tmp_path / "refused").touch()
    assert [outcome(process)[0] for process in first] == [0, 0]


@pytest.mark.parametrize(
    ("addr", "said"),
    [
        ("no-such-host.invalid", "MASTER_ADDR='no-such-host.invalid' cannot be resolved"),
        ("127.0.0.9", "Connection refused to 127.0.0.9"),
    ],
)
def test_r23_a_wrong_address_says_in_which_way(group, addr, said):
    assert said in outcome(group(1, MASTER_ADDR=addr, DISTRIBUTED_TIMEOUT_MS=500))[2]


def test_r23_an_address_of_another_host_on_rank_0(group):
    code, _, err = outcome(group(0, KIND="jax", MASTER_ADDR="192.0.2.99"))
    assert code == EXIT_CONFIG
    assert "MASTER_ADDR=192.0.2.99 is not an address of this host" in err


def test_r24_a_rank_that_dies_while_the_group_forms_may_come_again(group):
    first = group(0, KIND="jax", DISTRIBUTED_TIMEOUT_MS=60_000, WORLD_SIZE=3)
    doomed = group(1, WORLD_SIZE=3, DISTRIBUTED_TIMEOUT_MS=60_000)
    assert until(lambda: connected(doomed, group.port), 90)
    os.kill(doomed.pid, signal.SIGKILL)
    rest = [group(rank, KIND="jax", DISTRIBUTED_TIMEOUT_MS=60_000, WORLD_SIZE=3) for rank in (1, 2)]
    for process in [first, *rest]:
        code, _, err = outcome(process)
        assert code == 0, err


def test_r25_ranks_of_different_configuration_are_refused_with_both_values(tmp_path):
    from tests.support.launching import launch

    run = launch(tmp_path, 2, KIND="light", CONFIG_0="lr=0.1", CONFIG_1="lr=0.2")
    assert run.code == 1
    assert "ranks differ in config: lr=0.1 on rank 0; lr=0.2 on rank 1" in run.err


def test_r42_unauthenticated_clients_of_a_running_job(group, tmp_path):
    env = {"CYXJAX_TOKEN": "right", "DISTRIBUTED_TIMEOUT_MS": 60_000}
    env |= {"STEPS": 4000, "UNTIL": tmp_path / "refused"}
    job = [group(rank, KIND="jax", **env) for rank in range(2)]
    assert all(process.hears("under way") for process in job)
    for i in range(1000):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", group.port), timeout=2) as s,
        ):
            half_a_pair = b'{"mac":"\\ud800"}\n'  # used to end the thread that every rank depends on
            said = [b"\0" * 50, b'{"rank":0}\n' * 100, b"GET / HTTP/1.0\r\n\r\n", b"", half_a_pair]
            s.sendall(said[i % 5])
    (tmp_path / "refused").touch()
    for process in job:
        code, out, err = outcome(process)
        assert (code, "finished" in out) == (0, True), err
        assert err.count("refused a connection") <= 4  # 400 wrong hellos
