"""Ports are never shared, and a refusal says who holds what."""

import os
import socket

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch.group import ports


def test_a_port_held_by_a_sharing_program_is_refused_naming_its_holder():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(GroupError, match=rf"Port \d+ .*127\.0\.0\.1 .*pid {os.getpid()}"):
            ports.listen("127.0.0.1", other.getsockname()[1])


def test_a_reserved_port_keeps_others_out_but_lets_a_sharing_service_in():
    held, port = ports.reserve("127.0.0.1")
    with held, socket.socket() as service:
        with pytest.raises(GroupError, match=r"Port \d+ .*127\.0\.0\.1 .*MASTER_PORT"):
            ports.listen("127.0.0.1", port)
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        service.bind(("127.0.0.1", port))
        service.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            service.settimeout(5)
            connection, _ = service.accept()  # the reserving socket does not listen, so we are reached
            connection.close()
