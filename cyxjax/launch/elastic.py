"""This host's part of a job whose hosts come and go: starts are called by the census (see census.py)."""

import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from cyxjax.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED, GroupError
from cyxjax.launch import output, ports, wire
from cyxjax.launch.census import Census
from cyxjax.launch.crew import TICK_S, Crew, Nudge, Start
from cyxjax.launch.options import Options
from cyxjax.launch.place import Place
from cyxjax.launch.report import first_of
from cyxjax.launch.rounds import end_message
from cyxjax.launch.supervisor import say_token_is_missing
from cyxjax.launch.topology import join_address

RETRY_S = 0.2


class Stopped(Exception):
    """Signal `number` told this host to leave while it looked for the first one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Link:
    """This host's standing connection to the census. `inbox` holds calls to start, and the job's end.

    The census' wish to end a start goes straight to the crew; so does the loss of the connection, which
    also leaves None in the inbox.
    Raises: GroupError when the census does not answer within the group's timeout; Stopped.
    """

    def __init__(self, place: Place, crew: Crew) -> None:
        self.inbox: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()
        self.start = -1  # the one under way, which the loss of the connection ends
        self._crew = crew
        self._socket, self._lines = _dial(place, crew)
        threading.Thread(target=self._read, name="cyxjax-link", daemon=True).start()

    def send(self, message: wire.Message) -> None:
        try:
            self._socket.sendall(wire.encode(message))
        except OSError:  # the reader notices, and says so
            self._socket.close()

    def close(self) -> None:
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            while data := self._socket.recv(wire.MAX_LINE):
                for message in self._lines.feed(data):
                    self._hear(message)
        except (OSError, wire.BadMessage) as error:
            output.say(f"the connection to the first host broke: {error}")
        self.inbox.put(None)
        self._crew.nudge(Nudge(self.start))

    def _hear(self, message: wire.Message) -> None:
        if "say" in message:
            output.say(str(message["say"]))
        if "end" in message:
            self._crew.nudge(Nudge(int(message["end"]), message.get("polite") is True))
        elif "say" not in message:
            self.inbox.put(message)
            self._crew.nudge(Nudge())


class ElasticSupervisor:
    """Runs this host's ranks in every start it is called to. `run()` returns the exit code."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        assert options.hosts is not None
        low, high = options.hosts
        self._place, self._census = options.place, None
        if not self._place.token:
            say_token_is_missing(self._place.master_addr)
        if options.place.is_first:
            self._census = Census(self._place, low, high, options.max_restarts, output.say).start()
            self._place = self._census.place
        self._crew = Crew(options, env)

    def run(self) -> int:
        """Takes part until the job is over, or a signal tells this host to leave it."""
        with self._crew:
            try:
                return self._take_part()
            except Stopped as stopped:
                return _code_after(stopped.number)
            finally:
                if self._census is not None:
                    self._census.close()

    def _take_part(self) -> int:
        link = Link(self._place, self._crew)
        try:
            while True:
                message = self._next_call(link)
                if isinstance(message, int):
                    return message
                if message is None:
                    link.close()
                    output.say(f"the first host is gone ({self._address}); trying to reach it again")
                    link = Link(self._place, self._crew)
                elif "refused" in message:
                    raise GroupError(f"refused by {self._address}: {message['refused']}")
                elif "over" in message:
                    return self._end(message)
                elif (code := self._one_start(link, message)) is not None:
                    return code
        finally:
            link.close()

    def _next_call(self, link: Link) -> wire.Message | int | None:
        """The next call from the census, None when it is gone; an exit code when a signal came first."""
        while True:
            try:
                return link.inbox.get_nowait()
            except queue.Empty:
                number = self._crew.asked_to_end(TICK_S)
            if number is not None:
                return _code_after(number)

    def _one_start(self, link: Link, call: wire.Message) -> int | None:
        """Runs one start and tells the census how it ended; the exit code when this host leaves by it."""
        number = link.start = int(call["start"])
        base_rank, world_size = int(call["base_rank"]), int(call["world_size"])
        place = replace(
            self._place, base_rank=base_rank, world_size=world_size, master_port=int(call["master_port"])
        )
        start = self._crew.run(place, number)
        how = _how(start)
        if how == "failed":
            first = first_of(start.records, start.ended_early)
            self._crew.tell(start, first, "the first host decides what follows")
        link.send(end_message(number, how, start.step, start.records if how == "failed" else ()))
        return self._crew.after_signal(start) if how == "left" else None

    def _end(self, message: wire.Message) -> int:
        code = int(message["over"])
        if code != EXIT_OK and message.get("why"):
            output.say(str(message["why"]))
        return code

    @property
    def _address(self) -> str:
        return join_address(self._place.master_addr, self._place.master_port)


def _how(start: Start) -> str:
    """'left' after a signal to this launcher, 'failed' with an error, else 'ok' or 'preempted'."""
    if start.signalled is not None:
        return "left"
    if start.nudged and not start.records:
        return "preempted" if any(worker.returncode != EXIT_OK for worker in start.workers) else "ok"
    if start.records:
        return "failed"
    return "preempted" if EXIT_PREEMPTED in {worker.returncode for worker in start.workers} else "ok"


def _code_after(number: int) -> int:
    return EXIT_INTERRUPT if number == signal.SIGINT else EXIT_PREEMPTED


def _dial(place: Place, crew: Crew) -> tuple[socket.socket, wire.Lines]:
    """A connection on which the census has heard who we are. Raises: GroupError, Stopped."""
    end = time.monotonic() + place.timeout_ms / 1000
    while True:
        try:
            connection = socket.create_connection((place.master_addr, place.master_port), timeout=3.0)
            return connection, _introduce(connection, place)
        except OSError as error:
            if time.monotonic() > end:
                raise _unreachable(place, error) from error
        if (number := crew.sleep(RETRY_S)) is not None:
            raise Stopped(number)


def _introduce(connection: socket.socket, place: Place) -> wire.Lines:
    lines, messages = wire.Lines(), list[wire.Message]()
    while not messages:
        data = connection.recv(wire.MAX_LINE)
        if not data:
            raise ConnectionResetError("it closed the connection without a word")
        try:
            messages = lines.feed(data)
        except wire.BadMessage as error:
            raise _not_ours(place) from error
    if messages[0].get("cyxjax") != wire.PROTOCOL or not isinstance(messages[0].get("nonce"), str):
        raise _not_ours(place)
    hello: wire.Message = {"host": socket.gethostname(), "nproc": place.nproc, "run_id": place.run_id}
    hello |= {"first": place.is_first}
    hello["mac"] = wire.sign(place.token, messages[0]["nonce"], hello)
    connection.sendall(wire.encode(hello))
    connection.settimeout(None)
    ports.keep_alive(connection)
    return lines


def _not_ours(place: Place) -> GroupError:
    return GroupError(
        f"{join_address(place.master_addr, place.master_port)} answers, but not as a cyxjax job. "
        "HINT: choose another --master-port, on every host alike."
    )


def _unreachable(place: Place, error: OSError) -> GroupError:
    return GroupError(
        f"no answer from the first host at {join_address(place.master_addr, place.master_port)} for "
        f"{place.timeout_ms / 1000:g} s: {error.strerror or error}. HINT: start the launcher with "
        "--node-rank 0 on the host that --master-addr names, and check the network between the hosts."
    )
