"""Sockets: resolve an address, bind without sharing."""

import errno
import socket

from cyxjax.errors import ConfigError, GroupError

BACKLOG = 1024
_SILENCE_S = 10  # after which the other end counts as gone


def resolve(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """(family, (address, port)) pairs of `host`, IPv4 first. Raises: socket.gaierror."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    pairs = {(int(family), (str(where[0]), int(where[1]))) for family, _, _, _, where in found}
    return sorted(pairs, key=lambda pair: (pair[0] != socket.AF_INET, pair[1]))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on exactly `host:port` (port 0: any free one), not shared.

    Raises: GroupError when the port cannot be used or the name does not resolve, ConfigError when `host` is
        not this host.
    """
    try:
        family, where = resolve(host, port)[0]
        return socket.create_server(where, family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise GroupError(unresolved(host, error)) from error
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
            raise ConfigError(
                f"MASTER_ADDR={host} is not an address of this host ({socket.gethostname()}), which runs "
                "rank 0. HINT: set MASTER_ADDR to an address of rank 0's host (see `ip addr`), everywhere."
            ) from error
        in_use = "is in use by another process"
        why = in_use if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise GroupError(
            f"Port {port} on {host} {why}. "
            "HINT: choose another MASTER_PORT, or leave it out: the launcher then takes a free one."
        ) from error


def unresolved(host: str, error: socket.gaierror) -> str:
    """The message for a name that has no address."""
    return (
        f"MASTER_ADDR={host!r} cannot be resolved to an address ({error.strerror}). "
        "HINT: check the spelling with `getent hosts`, or give the IP address of rank 0's host."
    )


def reserve(host: str) -> tuple[socket.socket, int]:
    """(socket, port) of a free port on `host`, kept from others until the socket is closed.

    The socket does not listen. It allows sharing, as gRPC's own does, so that jax's service can bind
    beside it; programs that do not share are kept out, and connections reach only the service.
    """
    family, where = resolve(host, 0)[0]
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(where)
    return held, int(held.getsockname()[1])


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel find out within about 10 s that the other host is gone, whatever Python does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        socket.TCP_KEEPIDLE: _SILENCE_S // 3,
        socket.TCP_KEEPINTVL: _SILENCE_S // 5,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: _SILENCE_S * 1000,
    }
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
