"""This host's part of a job: its connection to the controller on the first host, and its ranks in every start
that the controller begins.
"""

import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from cyxjax.errors import EXIT_INTERRUPT, EXIT_OK, EXIT_PREEMPTED, EXIT_SECONDARY, GroupError
from cyxjax.launch import output
from cyxjax.launch.failure import record as records
from cyxjax.launch.failure.record import FIRST_ERROR, ErrorRecord, first_of
from cyxjax.launch.group import client
from cyxjax.launch.group.controller import Size
from cyxjax.launch.group.coordinator import Coordinator, warn_without_token
from cyxjax.launch.group.group_start import NO_START, end_message
from cyxjax.launch.group.protocol import Channel, Message
from cyxjax.launch.options import Options
from cyxjax.launch.output import ranks_text
from cyxjax.launch.supervise.scratch import ERRORS
from cyxjax.launch.supervise.worker import Start
from cyxjax.launch.supervise.worker_group import LOST, TICK_S, Stopped, WorkerGroup

SILENT_S = 120.0  # that the first host may send nothing after a failure, besides the group's timeout


class Supervisor:
    """One launcher, of a job of fixed or of changing size. `run()` returns its exit code (cyxjax.errors)."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        self._options, self._place = options, options.place
        self._size = Size(*options.hosts) if options.hosts else Size(world_size=options.place.world_size)
        client.refuse_loopback_name(options.place, options.place.nproc)
        self._first = Coordinator(options.place) if options.place.is_first else None
        if self._first is not None:
            self._place = self._first.place
        warn_without_token(self._place, output.say)
        self._server = client.Server(self._place, f"host {socket.gethostname()}", "the launcher's flags")
        self._workers = WorkerGroup(options, env)
        self._failed: Start | None = None  # the last start, if its error is yet to be shown
        self._followed = False  # whether its error was only the consequence of another host's
        self._answer_by = math.inf  # when a first host that has sent nothing since then counts as gone

    def run(self) -> int:
        """Takes part until the job is over, or a signal asks this host to leave it."""
        with self._workers:
            try:
                return self._take_part()
            except Stopped as stopped:
                if self._failed is not None:
                    self._show("not started again: it was asked to end")
                return _code_after(stopped.args[0])
            except Exception as error:
                if self._first is not None:
                    self._first.error = error
                raise
            finally:
                if self._first is not None:
                    self._first.end()

    def _take_part(self) -> int:
        channel = self._connect()
        try:
            while True:
                message = self._workers.between_starts(TICK_S)
                code: int | None = None
                if message or self._first is not None:
                    self._answer_by = math.inf
                elif time.monotonic() >= self._answer_by:
                    channel.close()  # it is suspended, or hangs: the end of the connection says so below
                if message is LOST:
                    channel.close()
                    if (code := self._without_first_host()) is None:
                        channel = self._connect()
                elif "decided" in message:
                    self._show(message["decided"])
                elif "refused" in message:
                    raise GroupError(
                        f"refused by {self._server.address}: {output.printable(message['refused'])}"
                    )
                elif "over" in message:
                    code = self._end(message)
                elif "start" in message:
                    code = self._one_start(channel, message)
                if code is not None:
                    return code
        except Stopped:
            with suppress(OSError):  # the first host is gone
                channel.send(end_message(NO_START, "left", -1))
            raise
        finally:
            channel.close()

    def _connect(self) -> Channel:
        """The connection to the first host, whose messages become events of the workers.

        Raises: GroupError when it cannot be reached within the group's timeout; Stopped.
        """
        place, world_size = self._place, self._size.world_size
        if self._first is not None:
            channel = self._first.lead(self._size, self._options.max_restarts, self._workers.scratch.path)
        else:
            hello = {
                "host": socket.gethostname(),
                "nproc": place.nproc,
                "base_rank": place.base_rank if world_size else -1,
                "world_size": world_size,
                "run_id": place.run_id,
            }
            channel = client.connect(self._server, hello, output.say, sleep=self._workers.sleep)
        words = (channel, self._workers.put)
        threading.Thread(target=_pass_on, args=words, name="cyxjax-link", daemon=True).start()
        return channel

    def _one_start(self, channel: Channel, call: Message) -> int | None:
        """Runs one start and reports how it ended; the exit code if this host then leaves the job."""
        if self._failed is not None:  # a host was lost, or the group changed its size: nothing was decided
            self._show(f"started again as start {call['start']}")
        self._followed = False
        if self._options.log_dir and call["start"] == 0:  # hosts that join later may find this job's record
            with suppress(OSError):  # an earlier job's
                os.unlink(os.path.join(self._options.log_dir, FIRST_ERROR))
        place = replace(self._place, base_rank=int(call["base_rank"]), world_size=int(call["world_size"]))
        start = self._workers.run(place, int(call["start"]))
        how, first = _how(start), _first(start)
        end = end_message(start.number, how, start.step, first if how == "failed" else None)
        try:
            channel.send(end)
        except OSError:  # the reader notices and reports it
            channel.close()
        if how == "failed":
            self._failed = start  # shown with what is decided
            self._answer_by = time.monotonic() + SILENT_S + self._place.timeout_ms / 1000
        if how != "left":
            return None
        if first is None:
            return self._after_signal(start)
        self._show_failure(start, first, "not started again: it was asked to end")
        return first.exit_code

    def _without_first_host(self) -> int | None:
        """The exit code after the first host was lost; None where the job may go on once it is back."""
        line = f"the first host is gone ({self._server.address})"
        if self._first is not None or (self._size.is_fixed and self._options.max_restarts == 0):
            self._show(line)
            return EXIT_SECONDARY
        self._show(f"{line}; trying to reach it again")
        return None

    def _show(self, line: str) -> None:
        """Shows what follows, with the error of this host's ranks if they failed."""
        start, self._failed = self._failed, None
        if start is None:
            output.say(line)
        else:
            first = first_of(start.records, start.ended_early)
            self._followed = first.secondary
            if self._place.is_alone:
                # No other host can have failed: NCCL could not start, or the network broke.
                first.secondary = False
            self._show_failure(start, first, line)

    def _show_failure(self, start: Start, first: ErrorRecord, then: str) -> None:
        """Shows and records how a start failed, and in one line what follows."""
        log_dir = self._options.log_dir
        try:
            path = records.save_first(first, log_dir or tempfile.mkdtemp(prefix=ERRORS))
        except OSError as error:
            path = f"none ({error.strerror})"
        if log_dir and any(worker.rank == first.rank for worker in start.workers):
            with suppress(OSError), output.open_log(log_dir, first.rank, start.number) as log:
                log.write(records.text_of(first).encode())
        others = [record for record in start.records if record is not first]
        records.show_failure(first, others, start.killed, path, then)

    def _after_signal(self, start: Start) -> int:
        """The exit code of a start that a signal ended."""
        assert start.signalled is not None
        if start.killed:
            why = start.hurried or f"after {self._options.grace_s:g} s"
            output.say(f"{ranks_text(start.killed)} killed {why}; the last finished checkpoint is kept")
        finished = all(worker.returncode == EXIT_OK for worker in start.workers)
        code = _code_after(start.signalled)
        return EXIT_OK if finished and code == EXIT_PREEMPTED else code

    def _end(self, message: Message) -> int:
        code = int(message["over"])
        if code != EXIT_OK and message["why"]:
            self._show(message["why"])
        # In a fixed job the exit code tells that this host's ranks only followed another host's failure.
        return EXIT_SECONDARY if self._size.is_fixed and code != EXIT_OK and self._followed else code


def _pass_on(channel: Channel, put: Callable[[Message], None]) -> None:
    """Shows what the first host says and passes its messages to `put`, until the connection ends."""
    try:
        while (message := channel.next()) is not None:
            if "say" in message:
                output.say(message["say"])
            put(message)
    except ValueError as error:
        output.say(f"the connection to the first host broke: {error}")
    put(LOST)


def _code_after(number: int) -> int:
    """The exit code after signal `number` asked for a stop."""
    return EXIT_INTERRUPT if number == signal.SIGINT else EXIT_PREEMPTED


def _first(start: Start) -> ErrorRecord | None:
    return first_of(start.records, start.ended_early) if start.records else None


def _how(start: Start) -> str:
    """'left' after a signal to this launcher, 'failed' with an error, else how the ranks ended."""
    codes = {worker.returncode for worker in start.workers}
    if start.signalled is not None:
        return "left"
    if start.records:
        return "failed"
    if start.is_asked_to_end:
        return "ok" if codes == {EXIT_OK} else "preempted"
    if EXIT_INTERRUPT in codes:
        return "interrupted"
    return "preempted" if EXIT_PREEMPTED in codes else "ok"
