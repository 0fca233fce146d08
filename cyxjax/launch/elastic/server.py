"""The door of a job whose hosts come and go: hosts that prove to be of the job are handed on as agents."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from cyxjax.launch.elastic.rounds import Said
from cyxjax.launch.group import ports, protocol
from cyxjax.launch.group.handshake import Handshake, PendingConnection
from cyxjax.launch.group.reactor import Log, Reactor
from cyxjax.launch.local_ranks import LocalRanks

MAX_RANKS = 65_536  # on one host


@dataclass(eq=False)
class Agent:
    """A host's launcher, as the registry knows it. `is_first`: the one beside it, host of rank 0."""

    connection: protocol.Channel
    host: str
    nproc: int
    is_first: bool

    def send(self, message: protocol.Message) -> None:
        try:
            self.connection.send(message)
        except OSError:  # gone: its reader notices
            self.connection.close()

    def close(self) -> None:
        self.connection.close()


class HostServer:
    """Listens on `place.master_addr:master_port`; hands on who comes, what they say, and that they went.

    tell: called from a thread per agent.
    Raises: GroupError when the port is held by another process; ConfigError when the address is not ours.
    """

    def __init__(self, place: LocalRanks, tell: Callable[[Said], None], log: Log) -> None:
        self._listener = ports.listen(place.master_addr, place.master_port)
        self.place = replace(place, master_port=self._listener.getsockname()[1])
        self._tell = tell
        self._handshake = Handshake(self._listener, place.token, self._welcome, log)
        self._reactor = Reactor("cyxjax-door", self._handshake.tick, self._handshake.close, log)

    def open(self) -> None:
        self._handshake.open(self._reactor)
        self._reactor.start()

    def close(self) -> None:
        self._reactor.close()
        self._listener.close()

    def _welcome(self, guest: PendingConnection, hello: protocol.Message) -> None:
        if why := self._refusal(hello):
            self._handshake.refuse(guest, why, f"refused a host at {guest.address}: {why}")
            return
        guest.socket.setblocking(True)
        ports.keep_alive(guest.socket)
        host = protocol.printable(hello["host"], 255)
        channel = protocol.Channel(guest.socket)
        channel.codec = guest.codec
        agent = Agent(channel, host, hello["nproc"], hello.get("first") is True)
        threading.Thread(target=self._hear, args=(agent,), name="cyxjax-agent", daemon=True).start()

    def _hear(self, agent: Agent) -> None:
        """Hands on what an agent says until the end of its connection."""
        self._tell((agent, {"came": True}))
        with suppress(protocol.BadMessage):  # like the end of the connection
            while (message := agent.connection.next()) is not None:
                message.pop("came", None)  # ours to say
                self._tell((agent, message))
        agent.close()
        self._tell((agent, None))

    def _refusal(self, hello: protocol.Message) -> str:
        if hello.get("run_id") != self.place.run_id:
            return f"this port belongs to job {self.place.run_id!r}. HINT: give each job its own port."
        nproc, host = hello.get("nproc"), hello.get("host")
        if type(nproc) is not int or not 0 < nproc <= MAX_RANKS or not isinstance(host, str):
            return "a host without a name or ranks. HINT: use one version of cyxjax."
        return ""
