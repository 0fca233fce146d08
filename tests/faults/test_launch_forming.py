"""Faults while a group forms, and strangers at its port: ranks are started by hand, one per command."""

import contextlib
import socket

import pytest

from tests.support import forked
from tests.support.launching import RANK
from tests.support.programs import environment, free_port

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def group():
    """Starts ranks by hand with one free port."""
    place = {"MASTER_PORT": free_port(), "KIND": "jax", "STEPS": 4000, "DISTRIBUTED_TIMEOUT_MS": 60_000}

    def rank(number, world_size=2, **env):
        variables = place | {"RANK": number, "WORLD_SIZE": world_size, **env}
        return forked.Program([RANK], environment(**variables))

    rank.port = place["MASTER_PORT"]
    return rank


def outcome(process):
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def test_r17_a_rank_that_never_starts_is_named(group):
    code, _, err = outcome(group(0, 3, DISTRIBUTED_TIMEOUT_MS=1000))
    assert code == 1
    assert "Timeout waiting for peers: ranks 1, 2 after 1 s; here: rank 0" in err
    assert "Traceback" not in err


def test_strangers_at_the_port_of_a_running_job_are_refused_and_it_goes_on(group, tmp_path):
    ours = {"CYXJAX_TOKEN": "right", "CYXJAX_RUN_ID": "first", "UNTIL": tmp_path / "refused"}
    job = [group(rank, **ours) for rank in range(2)]
    assert all(process.hears("under way") for process in job)
    # R20: a second rank 1; R22: another job on the same port
    refused = {
        "RANK=1 is taken": group(1, **ours),
        "wrong or missing job token": group(1, **ours | {"CYXJAX_TOKEN": "wrong"}),
        "belongs to job 'first'": group(1, **ours | {"CYXJAX_RUN_ID": "second"}),
        f"Port {group.port} on 127.0.0.1 is in use by": group(0, **ours | {"CYXJAX_RUN_ID": "second"}),
    }
    for message, process in refused.items():
        code, _, err = outcome(process)
        assert code == 1, (code, err)  # never a segmentation fault
        assert message in err
    # R42: a thousand clients that send anything; half a surrogate pair used to end the server's thread
    hostile = [b"\0" * 50, b'{"rank":0}\n' * 100, b"GET / HTTP/1.0\r\n\r\n", b"", b'{"mac":"\\ud800"}\n']
    for i in range(1000):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", group.port), timeout=2) as knock,
        ):
            knock.sendall(hostile[i % 5])
    (tmp_path / "refused").touch()
    for process in job:
        code, out, err = outcome(process)
        assert (code, "finished" in out) == (0, True), err
        assert err.count("refused a connection") <= 4  # 400 wrong hellos
