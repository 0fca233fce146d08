"""The door of a job whose hosts come and go: who proves to be of the job is let in, everybody else is not."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from cyxjax.launch.ranks_here import HostShare
from cyxjax.launch.rendezvous import ports, protocol

STRANGER_S = 5.0  # time to say hello
MAX_STRANGERS = 64  # at once; further ones are turned away


@dataclass(eq=False)
class Agent:
    """A host's launcher, as the registry knows it. `is_first`: the one beside it, host of rank 0."""

    connection: socket.socket
    host: str
    nproc: int
    is_first: bool

    def send(self, message: protocol.Message) -> None:
        try:
            self.connection.sendall(protocol.encode(message))
        except OSError:  # gone: its reader notices
            self.connection.close()

    def close(self) -> None:
        _hang_up(self.connection)


Said = tuple[Agent, protocol.Message | None]  # what an agent says; {"came": True} first, None at its end


class HostServer:
    """Listens on `place.master_addr:master_port`; hands on who comes, what they say, and that they went.

    tell: called from a thread per agent.
    Raises: GroupError when the port is held by another process; ConfigError when the address is not ours.
    """

    def __init__(self, place: HostShare, tell: Callable[[Said], None]) -> None:
        self._listener = ports.listen(place.master_addr, place.master_port)
        self.place = replace(place, master_port=self._listener.getsockname()[1])
        self._tell = tell
        self._room = threading.BoundedSemaphore(MAX_STRANGERS)

    def open(self) -> None:
        threading.Thread(target=self._admit_all, name="cyxjax-door", daemon=True).start()

    def close(self) -> None:
        _hang_up(self._listener)

    def _admit_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._hear, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _hear(self, connection: socket.socket) -> None:
        """Greets one connection; an agent's is read until its end, everybody else's is closed."""
        lines = protocol.Lines()
        with connection:
            try:
                agent = self._greet(connection, lines)
            except (protocol.BadMessage, OSError):  # a stranger gets nothing, and does no harm
                return
            finally:
                self._room.release()
            self._tell((agent, {"came": True}))
            with suppress(protocol.BadMessage, OSError):  # like the end of the connection
                while data := connection.recv(protocol.MAX_LINE):
                    for message in lines.feed(data):
                        self._tell((agent, message))
            self._tell((agent, None))

    def _greet(self, connection: socket.socket, lines: protocol.Lines) -> Agent:
        """The agent that proves it is of this job. Raises: BadMessage, OSError for anybody else."""
        nonce = protocol.new_nonce()
        connection.settimeout(STRANGER_S)
        connection.sendall(protocol.encode({"cyxjax": protocol.PROTOCOL, "nonce": nonce}))
        messages: list[protocol.Message] = []
        while not messages:
            data = connection.recv(protocol.MAX_LINE)
            if not data:
                raise protocol.BadMessage("no hello")
            messages = lines.feed(data)
        hello = messages[0]  # an agent has nothing more to say until it is called
        why = self._refusal(hello, nonce)
        if why:
            connection.sendall(protocol.encode({"refused": why}))
            raise protocol.BadMessage(why)
        connection.settimeout(None)
        ports.keep_alive(connection)
        return Agent(connection, str(hello["host"])[:255], hello["nproc"], hello.get("first") is True)

    def _refusal(self, hello: protocol.Message, nonce: str) -> str:
        if not protocol.verify(self.place.token, nonce, hello):
            return "wrong or missing job token. HINT: set CYXJAX_TOKEN alike on every host of the job."
        if hello.get("run_id") != self.place.run_id:
            return f"this port belongs to job {self.place.run_id!r}. HINT: give each job its own port."
        nproc = hello.get("nproc")
        if not isinstance(nproc, int) or nproc < 1 or not isinstance(hello.get("host"), str):
            return "a host without a name or ranks. HINT: use one version of cyxjax."
        return ""


def _hang_up(connection: socket.socket) -> None:
    """Closes it also for a thread that waits on it, which a plain close does not wake."""
    with suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
