"""The server of a group's first host, in this process, with what connects to it."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from cyxjax.errors import GroupError
from cyxjax.launch.group import client, ports
from cyxjax.launch.group.client import GroupConnection
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.group.protocol import Channel, Message
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.topology import Topology
from tests.support.programs import free_port

TOKEN = "secret"
RANK = {"rank": 0, "world_size": 2, "run_id": "job", "generation": 0, "host": "h", "pid": 1, "facts": {}}


class Meeting:
    """The first host of a job, with a rank of its own; `said` is its log.

    size: of the hosts that it leads, with `own` as its own launcher's connection; None where ranks are
    started by hand. hello: of one who fits in.
    """

    def __init__(self, world_size: int = 2, size: Size | None = None, timeout_s: int = 20) -> None:
        self.said: list[str] = []
        self._world_size, self._members, self._channels = world_size, list[GroupConnection](), list[Channel]()
        place = LocalRanks(1, 0, world_size, "127.0.0.1", 0, "job", 1000 * timeout_s, TOKEN)
        self.first = Coordinator(place, self.said.append, serves=False)
        self.port, self.server = self.first.place.master_port, self.first.server
        self.hello: Message = RANK | {"world_size": world_size}
        if size is None:
            self.first.open(0)
        else:
            base = 1 if size.is_fixed else -1
            self.hello = {"host": "h", "nproc": 1, "run_id": "job", "base_rank": base}
            self.hello["world_size"] = size.world_size
            self.own = self.first.lead(size, 0)
            self._channels.append(self.own)

    def close(self) -> None:
        for member in self._members:
            member.leave()
        self.first.end()
        for channel in self._channels:
            channel.close()

    def join(self, rank: int, facts: dict[str, str] | None = None, **changes: object) -> GroupConnection:
        """As a rank's process does."""
        place = {"world_size": self._world_size, "token": TOKEN, "run_id": "job", "timeout_ms": 8000}
        topology = Topology(rank, master_port=self.port, hosted=True, **(place | changes))
        member = client.join(topology, facts, log=self.said.append)
        self._members.append(member)
        return member

    def join_all(self, *ranks: int, **changes: object) -> list[GroupConnection | str]:
        """For each what `join` gave it, or the text of the GroupError it raised."""

        def outcome(rank: int) -> GroupConnection | str:
            try:
                return self.join(rank, **changes)
            except GroupError as error:
                return str(error)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(outcome, ranks))

    def knock(self, address: str = "127.0.0.1") -> socket.socket:
        """A connection, from `address`, of one who has said nothing yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(address, 0))

    def introduce(
        self, connection: socket.socket | None = None, kind: type[Channel] = Channel, **changes: object
    ) -> Channel:
        """The channel on which a client who knows the token has sent its hello."""
        channel = kind(connection or self.knock())
        self._channels.append(channel)
        where = client.Server("127.0.0.1", self.port, TOKEN, 10.0, "a client", "the test")
        client._introduce(channel, self.hello | changes, where)
        return channel


def by_hand(world_size: int = 2, **changes: object) -> list[Topology]:
    """The places of ranks that are started by hand, at a free port."""
    place = {"master_port": free_port(), "token": TOKEN, "timeout_ms": 20_000, **changes}
    return [Topology(rank, world_size, **place) for rank in range(world_size)]


@contextmanager
def impostor(greeting: bytes, answer: Callable[[Message], bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """(port, all that clients have sent) of a program without the token, where ranks look for their group.

    answer: to a client's first message.
    """
    received: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):  # the test is over
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(5)
                    connection.sendall(greeting)
                    while data := connection.recv(65_536):
                        received.append(data)
                        if len(received) == 1:
                            connection.sendall(answer(json.loads(data)))

    with ports.listen("127.0.0.1", 0) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], received


@contextmanager
def flood(port: int, number: int, address: str) -> Iterator[None]:
    """So many clients of `address` that prove nothing and connect again as soon as they are dropped."""
    over = threading.Event()

    def come_back() -> None:
        while not over.is_set():
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5, (address, 0)) as knock,
            ):
                while not over.is_set() and knock.recv(4096):
                    pass
            over.wait(0.01)  # not to spin once nobody is there

    with ThreadPoolExecutor(number) as pool:
        for _ in range(number):
            pool.submit(come_back)
        try:
            yield
        finally:
            over.set()
