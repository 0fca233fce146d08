"""This host's part of a job: its connection to the controller on the first host, and its ranks in every start
that the controller begins.
"""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cyxjax.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED, EXIT_SECONDARY, GroupError
from cyxjax.launch import output
from cyxjax.launch.failure.record import ErrorRecord, first_of
from cyxjax.launch.group import client, protocol
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.coordinator import Coordinator, warn_without_token
from cyxjax.launch.group.group_start import end_message
from cyxjax.launch.group.protocol import Message
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.options import Options
from cyxjax.launch.supervise.worker import Start
from cyxjax.launch.supervise.worker_group import TICK_S, Nudge, WorkerGroup, code_after
from cyxjax.launch.topology import join_address

_SENT: dict[str, Callable[[Any], Any]] = {  # by the controller: what reads it again
    **dict.fromkeys(("start", "base_rank", "world_size", "over"), int),
    **dict.fromkeys(("decided", "refused"), protocol.printable),
    "why": partial(protocol.printable, keep="\n"),
}


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
        elif "say" not in message:
            self._is_over = "over" in message
            self.inbox.put({name: _SENT[name](value) for name, value in message.items()})
            self._end_start(-1, False)
            if self._is_over:
                self._end_start(self.start, True)  # where the first host leaves; else none is under way


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


class Stopped(Exception):
    """Signal `number` asked this host to leave between two starts."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Supervisor:
    """One launcher, of a job of fixed or of changing size. `run()` returns its exit code (cyxjax.errors)."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        self._options, self._place = options, options.place
        self._size = Size(*options.hosts) if options.hosts else Size(world_size=options.place.world_size)
        self._first = Coordinator(options.place) if options.place.is_first else None
        if self._first is not None:
            self._place = self._first.place
        warn_without_token(self._place, output.say)
        self._workers = WorkerGroup(options, env)
        self._failed: Start | None = None  # the last start, if its error is yet to be shown
        self._followed = False  # whether its error was only the consequence of another host's

    def run(self) -> int:
        """Takes part until the job is over, or a signal asks this host to leave it."""
        with self._workers:
            try:
                return self._take_part()
            except Stopped as stopped:
                if self._failed is not None:
                    self._show("not started again: it was asked to end")
                return code_after(stopped.number)
            finally:
                if self._first is not None:
                    self._first.end()

    def _take_part(self) -> int:
        link = self._link()
        try:
            while True:
                message = self._next(link)
                if message is None:
                    link.close()
                    if (code := self._without_first_host()) is not None:
                        return code
                    link = self._link()
                elif "decided" in message:
                    self._show(message["decided"])
                elif "refused" in message:
                    raise GroupError(f"refused by {self._address}: {message['refused']}")
                elif "over" in message:
                    return self._end(message)
                elif (code := self._one_start(link, message)) is not None:
                    return code
        finally:
            link.close()

    def _link(self) -> HostLink:
        if self._first is not None:
            channel = self._first.lead(self._size, self._options.max_restarts, self._workers.folder)
        else:
            channel = connect(self._place, self._size.world_size, self._sleep)
        return HostLink(channel, lambda start, polite: self._workers.nudge(Nudge(start, polite)))

    def _next(self, link: HostLink) -> Message | None:
        """What the controller sends next; None when its host is gone. Raises: Stopped."""
        while True:
            try:
                return link.inbox.get_nowait()
            except queue.Empty:
                self._sleep(TICK_S, until_any=True)

    def _sleep(self, seconds: float, *, until_any: bool = False) -> None:
        wait = self._workers.asked_to_end if until_any else self._workers.sleep
        if (number := wait(seconds)) is not None:
            raise Stopped(number)

    def _one_start(self, link: HostLink, call: Message) -> int | None:
        """Runs one start and reports how it ended; the exit code when this host leaves the job by it."""
        number = link.start = call["start"]
        self._followed = False
        place = replace(self._place, base_rank=call["base_rank"], world_size=call["world_size"])
        start = self._workers.run(place, number)
        how, first = _how(start), _first(start)
        link.send(end_message(number, how, start.step, first if how == "failed" else None))
        if how == "failed":
            self._failed = start  # shown with what is decided
        return self._leave(start, first) if how == "left" else None

    def _leave(self, start: Start, first: ErrorRecord | None) -> int:
        if first is None:
            return self._workers.after_signal(start)
        self._workers.show_failure(start, first, "not started again: it was asked to end")
        return first.exit_code

    def _without_first_host(self) -> int | None:
        """The exit code after the first host was lost; None where the job may go on once it is back."""
        line = f"the first host is gone ({self._address})"
        if self._size.is_fixed and self._options.max_restarts == 0:
            self._show(line)
            return EXIT_SECONDARY
        self._show(f"{line}; trying to reach it again")
        return None

    def _show(self, line: str) -> None:
        """Shows what follows, with the error of this host's ranks if they failed."""
        start, self._failed = self._failed, None
        if start is None:
            output.say(line)
        elif (first := _first(start)) is not None:
            self._followed = first.secondary
            self._workers.show_failure(start, first, line)

    def _end(self, message: Message) -> int:
        code = int(message["over"])
        if code != EXIT_OK and message["why"]:
            self._show(message["why"])
        # In a fixed job the host whose ranks only followed another's failure says so by its exit code.
        return EXIT_SECONDARY if self._size.is_fixed and code != EXIT_OK and self._followed else code

    @property
    def _address(self) -> str:
        return join_address(self._place.master_addr, self._place.master_port)


def _first(start: Start) -> ErrorRecord | None:
    return first_of(start.records, start.ended_early) if start.records else None


def _how(start: Start) -> str:
    """'left' after a signal to this launcher, 'failed' with an error, else how the ranks ended."""
    codes = {worker.returncode for worker in start.workers}
    if start.signalled is not None:
        return "left"
    if start.records:
        return "failed"
    if start.nudged:
        return "ok" if codes == {EXIT_OK} else "preempted"
    if EXIT_INTERRUPT in codes:
        return "interrupted"
    return "preempted" if EXIT_PREEMPTED in codes else "ok"
