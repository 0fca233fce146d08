"""A launcher's connection to the controller of its job, which runs on the first host."""

import queue
import socket
import threading
from collections.abc import Callable

from cyxjax.launch import output
from cyxjax.launch.group import client, protocol
from cyxjax.launch.local_ranks import LocalRanks

_START = ("start", "base_rank", "world_size")


class HostLink:
    """`inbox` holds the starts to run, decisions, and the end of the job; None once the connection is lost.

    end_start(number, polite): called from a thread when the controller wants a start to end, and, impolitely,
    when the connection is lost; also with -1 whenever something is in the inbox.
    """

    def __init__(self, channel: protocol.Channel, end_start: Callable[[int, bool], None]) -> None:
        self.inbox: queue.SimpleQueue[protocol.Message | None] = queue.SimpleQueue()
        self.start = -1  # the one under way
        self._channel, self._end_start, self._is_over = channel, end_start, False
        threading.Thread(target=self._read, name="cyxjax-link", daemon=True).start()

    def send(self, message: protocol.Message) -> None:
        try:
            self._channel.send(message)
        except OSError:  # the reader notices and reports it
            self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        try:
            while (message := self._channel.next()) is not None:
                self._hear(message)
        except (ValueError, KeyError, TypeError) as error:  # a message of another version is one too
            output.say(f"the connection to the first host broke: {type(error).__name__}: {error}")
        if not self._is_over:
            self.inbox.put(None)
            self._end_start(self.start, False)

    def _hear(self, message: protocol.Message) -> None:
        if "say" in message:
            output.say(protocol.printable(message["say"]))
        if "end" in message:
            self._end_start(int(message["end"]), message.get("polite") is True)
        elif "start" in message:
            self._put({name: int(message[name]) for name in _START})
        elif "decided" in message:
            self._put({"decided": protocol.printable(message["decided"])})
        elif "over" in message:
            self._is_over = True
            why = protocol.printable(message.get("why", ""), keep="\n")
            self._put({"over": int(message["over"]), "why": why})
            self._end_start(self.start, True)  # where the first host leaves; else none is under way
        elif "refused" in message:
            self._put({"refused": protocol.printable(message["refused"])})

    def _put(self, message: protocol.Message) -> None:
        self.inbox.put(message)
        self._end_start(-1, False)


def connect(place: LocalRanks, world_size: int, sleep: Callable[[float], object]) -> protocol.Channel:
    """This launcher's connection to the first host's. world_size: 0 in an elastic job.

    Raises: GroupError when it cannot be reached within the group's timeout; whatever `sleep` raises.
    """
    name = socket.gethostname()
    where = (place.master_addr, place.master_port, place.token, place.timeout_ms / 1000)
    base_rank = place.base_rank if world_size else -1
    hello = {"host": name, "nproc": place.nproc, "base_rank": base_rank, "world_size": world_size}
    hello |= {"run_id": place.run_id}
    server = client.Server(*where, f"host {name}", "the launcher's flags")
    return client.connect(server, hello, output.say, sleep=sleep)
