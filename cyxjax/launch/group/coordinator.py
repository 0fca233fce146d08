"""What stands where the ranks of a job meet: the port, the meeting place, and jax's coordination service."""

import os
import socket
import threading
from dataclasses import replace

from cyxjax.launch import output
from cyxjax.launch.backend import jax_private
from cyxjax.launch.group import ports
from cyxjax.launch.group.reactor import Log
from cyxjax.launch.group.roster import Job, Roster
from cyxjax.launch.group.server import RendezvousServer
from cyxjax.launch.local_ranks import LocalRanks
from cyxjax.launch.topology import join_address

LOAD_AFTER_S = 0.1


def warn_without_token(place: LocalRanks, log: Log) -> None:
    """One line for a job without a secret, which only a launcher of all its ranks can make up by itself."""
    if not (place.token or place.is_alone):
        log(f"CYXJAX_TOKEN is not set: whoever reaches {place.master_addr} can join this job")


class Coordinator:
    """One listener for the life of the job; a meeting place, and where it `serves` a service, for each start.

    With the service in a supervisor no rank is special: rank 0 may die like any other. Where no supervisor is
    (a job started by hand), rank 0 serves at the address it is told, which is kept free for it.
    Raises: GroupError when the port is held by another process; ConfigError when the address is not ours.
    """

    def __init__(self, place: LocalRanks, log: Log = output.say, *, serves: bool = True) -> None:
        self._listener = ports.listen(place.master_addr, place.master_port)
        self.place = replace(place, master_port=self._listener.getsockname()[1])
        self._log, self._serves = log, serves
        self._meeting: RendezvousServer | None = None
        self._service: jax_private.CoordinationService | None = None
        self._reserved: socket.socket | None = None
        # Loading jaxlib takes 0.1 s, which the ranks need anyway to start; they are started first. No daemon:
        # a process that ends while a thread loads native code may abort.
        self._load = threading.Timer(LOAD_AFTER_S, jax_private.can_serve)
        self._load.name = "cyxjax-load"
        if serves:
            # Its service would narrate every connection of every start on our standard error.
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
            self._load.start()

    def open(self, start: int) -> None:
        """Opens the meeting place of start number `start`."""
        place = self.place
        job = Job(place.world_size, place.run_id, start, place.timeout_ms / 1000, place.token)
        self._meeting = RendezvousServer(self._listener, job, self._coordinator, self._log).start()

    def wait_until_empty(self, timeout_s: float) -> None:
        """Returns when every rank of this start has left, or after `timeout_s`."""
        if self._meeting is not None:
            self._meeting.wait_until_empty(timeout_s)

    def close(self) -> None:
        """Ends this start's meeting place and service. The ranks must have ended."""
        if self._meeting is not None:
            self._meeting.close()
        if self._service is not None:
            self._service.close()
        if self._reserved is not None:
            self._reserved.close()
        self._meeting = self._service = self._reserved = None

    def end(self) -> None:
        """Closes everything, the listener too."""
        self._load.cancel()
        self.close()
        self._listener.close()

    def _coordinator(self, roster: Roster) -> dict[str, object]:
        """Starts the service once all ranks are here; where this jaxlib cannot, rank 0 is to do it."""
        self._reserved, port = ports.reserve(self.place.master_addr)
        address = join_address(self.place.master_addr, port)
        served = self._serves and jax_private.can_serve()
        if served:
            self._service = jax_private.CoordinationService(address, len(roster.present))
        return {"address": address, "served": served}
