"""This host's part of a job whose hosts come and go: starts are called by the registry (see registry.py)."""

import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from cyxjax.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED, GroupError
from cyxjax.launch import output
from cyxjax.launch.elastic.group_start import end_message
from cyxjax.launch.elastic.registry import Registry
from cyxjax.launch.failure.report import first_of
from cyxjax.launch.group import handshake, ports, protocol
from cyxjax.launch.group.client import unknown_server
from cyxjax.launch.group.coordinator import warn_without_token
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.options import Options
from cyxjax.launch.supervise.start import Start
from cyxjax.launch.supervise.worker_group import TICK_S, Nudge, WorkerGroup
from cyxjax.launch.topology import join_address

RETRY_S = 0.2
GREETING_S = 3.0
_CALL = ("start", "base_rank", "world_size", "master_port")


class Stopped(Exception):
    """Signal `number` told this host to leave while it looked for the first one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Link:
    """This host's standing connection to the registry. `inbox` holds calls to start, and the job's end.

    The registry's wish to end a start goes straight to the workers; so does the loss of the connection, which
    also leaves None in the inbox.
    Raises: GroupError when the registry does not answer within the group's timeout; Stopped.
    """

    def __init__(self, place: LocalRanks, workers: WorkerGroup) -> None:
        self.inbox: queue.SimpleQueue[protocol.Message | None] = queue.SimpleQueue()
        self.start = -1  # the one under way, which the loss of the connection ends
        self._workers = workers
        self._channel = _dial(place, workers)
        threading.Thread(target=self._read, name="cyxjax-link", daemon=True).start()

    def send(self, message: protocol.Message) -> None:
        try:
            self._channel.send(message)
        except OSError:  # the reader notices, and says so
            self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        try:
            while (message := self._channel.next()) is not None:
                self._hear(message)
        except (ValueError, KeyError, TypeError) as error:  # a word of another version is one too
            output.say(f"the connection to the first host broke: {type(error).__name__}: {error}")
        self.inbox.put(None)
        self._workers.nudge(Nudge(self.start))

    def _hear(self, message: protocol.Message) -> None:
        if "say" in message:
            output.say(protocol.printable(message["say"]))
        if "end" in message:
            self._workers.nudge(Nudge(int(message["end"]), message.get("polite") is True))
        elif "start" in message or "over" in message or "refused" in message:
            for name in _CALL if "start" in message else ():
                message[name] = int(message[name])
            self.inbox.put(message)
            self._workers.nudge(Nudge())


class ElasticSupervisor:
    """Runs this host's ranks in every start it is called to. `run()` returns the exit code."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        assert options.hosts is not None
        low, high = options.hosts
        self._place, self._registry = options.place, None
        warn_without_token(self._place, output.say)
        if options.place.is_first:
            self._registry = Registry(self._place, low, high, options.max_restarts, output.say).start()
            self._place = self._registry.place
        self._workers = WorkerGroup(options, env)

    def run(self) -> int:
        """Takes part until the job is over, or a signal tells this host to leave it."""
        with self._workers:
            try:
                return self._take_part()
            except Stopped as stopped:
                return _code_after(stopped.number)
            finally:
                if self._registry is not None:
                    self._registry.close()

    def _take_part(self) -> int:
        link = Link(self._place, self._workers)
        try:
            while True:
                message = self._next_call(link)
                if isinstance(message, int):
                    return message
                if message is None:
                    link.close()
                    output.say(f"the first host is gone ({self._address}); trying to reach it again")
                    link = Link(self._place, self._workers)
                elif "refused" in message:
                    raise GroupError(f"refused by {self._address}: {protocol.printable(message['refused'])}")
                elif "over" in message:
                    return self._end(message)
                elif (code := self._one_start(link, message)) is not None:
                    return code
        finally:
            link.close()

    def _next_call(self, link: Link) -> protocol.Message | int | None:
        """The next call from the registry, None when it is gone; an exit code when a signal came first."""
        while True:
            try:
                return link.inbox.get_nowait()
            except queue.Empty:
                number = self._workers.asked_to_end(TICK_S)
            if number is not None:
                return _code_after(number)

    def _one_start(self, link: Link, call: protocol.Message) -> int | None:
        """Runs one start and tells the registry how it ended; the exit code when this host leaves by it."""
        number, base_rank, world_size, master_port = (call[name] for name in _CALL)
        link.start = number
        place = replace(self._place, base_rank=base_rank, world_size=world_size, master_port=master_port)
        start = self._workers.run(place, number)
        how = _how(start)
        if how == "failed":
            first = first_of(start.records, start.ended_early)
            self._workers.tell(start, first, "the first host decides what follows")
        link.send(end_message(number, how, start.step, start.records if how == "failed" else ()))
        return self._workers.after_signal(start) if how == "left" else None

    def _end(self, message: protocol.Message) -> int:
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


def _dial(place: LocalRanks, workers: WorkerGroup) -> protocol.Channel:
    """A connection on which the registry has heard who we are. Raises: GroupError, Stopped."""
    end = time.monotonic() + place.timeout_ms / 1000
    while True:
        try:
            connection = socket.create_connection((place.master_addr, place.master_port), timeout=3.0)
            return _introduce(connection, place)
        except OSError as error:
            if time.monotonic() > end:
                raise _unreachable(place, error) from error
        if (number := workers.sleep(RETRY_S)) is not None:
            raise Stopped(number)


def _introduce(connection: socket.socket, place: LocalRanks) -> protocol.Channel:
    channel = protocol.Channel(connection)
    hello: protocol.Message = {"host": socket.gethostname(), "nproc": place.nproc, "run_id": place.run_id}
    hello |= {"first": place.is_first}
    try:
        if not handshake.introduce(channel, hello, place.token, GREETING_S):
            raise ConnectionResetError("it closed the connection without a word")
    except (handshake.Refused, handshake.UnknownServer) as error:
        connection.close()
        address = join_address(place.master_addr, place.master_port)
        if isinstance(error, handshake.UnknownServer):
            raise unknown_server(address) from error
        raise GroupError(f"refused by {address}: {error}") from error
    except protocol.BadMessage as error:
        connection.close()
        raise _not_ours(place) from error
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    ports.keep_alive(connection)
    return channel


def _not_ours(place: LocalRanks) -> GroupError:
    return GroupError(
        f"{join_address(place.master_addr, place.master_port)} answers, but not as a cyxjax job. "
        "HINT: choose another --master-port, on every host alike."
    )


def _unreachable(place: LocalRanks, error: OSError) -> GroupError:
    return GroupError(
        f"no answer from the first host at {join_address(place.master_addr, place.master_port)} for "
        f"{place.timeout_ms / 1000:g} s: {error.strerror or error}. HINT: start the launcher with "
        "--node-rank 0 on the host that --master-addr names, and check the network between the hosts."
    )
