"""Which hosts take part in a job of changing size: the first host counts them and calls the starts.

Every launcher of the job, the first host's too, keeps one connection to the registry. Hosts that come or go
cost one restart of the group; what the ranks do with another WORLD_SIZE is theirs (checkpoints resume).
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cyxjax.errors import EXIT_INFRASTRUCTURE, EXIT_PREEMPTED, CyxjaxError
from cyxjax.launch.elastic.rounds import Over, Rounds, Said
from cyxjax.launch.elastic.server import HostServer
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.supervise.restarts import Budget

Log = Callable[[str], None]


class Registry:
    """Runs in a thread of the first host's launcher, on `place.master_addr:master_port`.

    low, high: the fewest and the most hosts. The job waits for `low` of them for the group's timeout.
    """

    def __init__(self, place: LocalRanks, low: int, high: int, max_restarts: int, log: Log) -> None:
        self._events: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._server = HostServer(place, self._events.put, log)
        self.place = self._server.place
        timeout_s = self.place.timeout_ms / 1000
        self._rounds = Rounds(low, high, timeout_s, Budget(max_restarts), self, log)
        self._over: Over | None = None
        self._caller = threading.Thread(target=self._call, name="cyxjax-registry", daemon=True)

    def start(self) -> "Registry":
        self._server.open()
        self._caller.start()
        return self

    def close(self) -> None:
        """Closes the door and every connection: a host that is still there takes it for the end."""
        if self._caller.is_alive() and self._over is None:
            self._finish(Over(EXIT_PREEMPTED, "the first host leaves, and the job ends with it"))
        self._caller.join(timeout=1.0)
        self._server.close()
        for agent in list(self._rounds.agents):
            agent.close()

    def _call(self) -> None:
        number, over = 0, None
        try:
            while (over := self._over or self._rounds.one_start(number)) is None:
                number += 1
        except CyxjaxError as error:  # no port for the meeting place
            over = Over(EXIT_INFRASTRUCTURE, str(error))
        except Exception:  # a fault of ours: with this thread gone every host would wait for ever
            over = Over(EXIT_INFRASTRUCTURE, f"the first host cannot go on:\n{traceback.format_exc()}")
        if self._over is None:
            self._finish(over)

    def _finish(self, over: Over) -> None:
        """Tells every host that the job is over; the first host last, since its launcher then ends."""
        self._over = over
        for agent in sorted(list(self._rounds.agents), key=lambda agent: agent.is_first):
            agent.send({"over": over.code, "why": over.why})

    # -- the world of the rounds ---------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def next(self, seconds: float) -> Said | None:
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextmanager
    def meeting(self, number: int, num_ranks: int) -> Iterator[int]:
        host = Coordinator(replace(self.place, world_size=num_ranks, base_rank=0, master_port=0))
        host.open(number)
        try:
            yield host.place.master_port
        finally:
            host.end()
