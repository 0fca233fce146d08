"""The server of a group's first host, in this process, and clients that connect to it."""

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
RANK = {
    "rank": 0,
    "world_size": 2,
    "run_id": "job",
    "generation": 0,
    "timeout_s": 20,
    "host": "h",
    "pid": 1,
    "facts": {},
}


class Meeting:
    """The first host of a job, with one rank; `log` is its log.

    size: of the job, for a host whose launcher has the connection `own`; None if ranks are started by hand.
    hello: the first message of a client that matches the job.
    """

    def __init__(self, world_size: int = 2, size: Size | None = None, timeout_s: int = 20) -> None:
        self.log: list[str] = []
        self._world_size, self._members, self._channels = world_size, list[GroupConnection](), list[Channel]()
        place = LocalRanks(1, 0, world_size, "127.0.0.1", 0, "job", 1000 * timeout_s, TOKEN)
        self.first = Coordinator(place, self.log.append, serves=False)
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
        """Joins the group as the process of a rank does."""
        place = {"world_size": self._world_size, "token": TOKEN, "run_id": "job", "timeout_ms": 8000}
        topology = Topology(rank, master_port=self.port, hosted=True, **(place | changes))
        member = client.join(topology, facts, log=self.log.append)
        self._members.append(member)
        return member

    def join_all(self, *ranks: int, **changes: object) -> list[GroupConnection | str]:
        """The result of `join` for each rank, or the text of the GroupError that it raised."""

        def outcome(rank: int) -> GroupConnection | str:
            try:
                return self.join(rank, **changes)
            except GroupError as error:
                return str(error)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(outcome, ranks))

    def knock(self, address: str = "127.0.0.1") -> socket.socket:
        """A connection from `address` on which nothing has been sent yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(address, 0))

    def introduce(
        self, connection: socket.socket | None = None, kind: type[Channel] = Channel, **changes: object
    ) -> Channel:
        """The channel of a client that knows the token and has sent its hello."""
        channel = kind(connection or self.knock())
        self._channels.append(channel)
        where = client.Server(Topology(master_port=self.port, token=TOKEN), "a client", "the test")
        client._introduce(channel, self.hello | changes, where)
        return channel


def by_hand(world_size: int = 2, **changes: object) -> list[Topology]:
    """The topologies of ranks that are started by hand, at a free port."""
    place = {"master_port": free_port(), "token": TOKEN, "timeout_ms": 20_000, **changes}
    return [Topology(rank, world_size, **place) for rank in range(world_size)]


@contextmanager
def impostor(greeting: bytes, answer: Callable[[Message], bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """(port, data sent by clients) of a program without the token, in place of the group's server.

    answer: its reply to the first message of a client.
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
    """`number` clients from `address` that never authenticate, and reconnect as soon as they are dropped."""
    over = threading.Event()

    def come_back() -> None:
        while not over.is_set():
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 5, (address, 0)) as knock,
            ):
                while not over.is_set() and knock.recv(4096):
                    pass
            over.wait(0.01)  # no busy loop once the server has ended

    with ThreadPoolExecutor(number) as pool:
        for _ in range(number):
            pool.submit(come_back)
        try:
            yield
        finally:
            over.set()
