"""The coordination service's key-value store: texts exchanged between ranks, without any device."""

import re
import time
from typing import Any

from cyxjax.errors import GroupError
from cyxjax.launch.backend import jax_private

_LATE = re.compile(r"timed out task names:\s*((?:\d+[\s,]*)+)")


class Peers:
    """This rank's talk with all others: `exchange` is a collective of small texts.

    Talks over different channels know nothing of each other: a thread has one of its own.
    Two slots are used in turn, so nothing needs deleting: whoever writes slot n % 2 again has passed
    barrier n + 1, at which every rank had read exchange n.
    """

    def __init__(self, rank: int, world_size: int, channel: str = "talk") -> None:
        self.rank, self.world_size, self._prefix = rank, world_size, f"cyxjax/{channel}"
        self.count = 0  # exchanges begun
        # Names the barrier: the service counts a barrier's uses, and a rank that comes late to a failed one
        # must meet that failure, not the next use. Every rank sees every failure, so the names agree.
        self.failures = 0
        self._barrier_used = False

    def exchange(self, text: str, timeout_s: float, what: str) -> list[str]:
        """Every rank's `text`, by rank.

        Raises: GroupError on every rank, naming those that did not come within `timeout_s`.
        """
        self.count += 1
        folder = f"{self._prefix}/{self.count % 2}/"
        client = _client()
        self._refuse_if_given_up(what)
        client.key_value_set(f"{folder}{self.rank}", f"{self.count} {text}", allow_overwrite=True)
        start = time.monotonic()
        try:
            client.wait_at_barrier(f"{self._prefix}/{self.failures}", max(1, round(timeout_s * 1000)))
        except Exception as error:  # jaxlib's error type is private; the text says what happened
            found = self._missing(str(error), self._read(folder), time.monotonic() - start, what)
            client.key_value_set(f"{self._prefix}/given_up/{self.failures}", str(found), allow_overwrite=True)
            self._next_barrier()
            raise found from error
        self._barrier_used = True
        return [text for _, text in sorted(self._read(folder).items())]

    def _refuse_if_given_up(self, what: str) -> None:
        """A rank that is late for a barrier's first use would open it anew (jaxlib 0.10.2) and wait alone."""
        if self._barrier_used:
            return
        verdicts = dict(_client().key_value_dir_get(f"{self._prefix}/given_up/"))
        verdict = verdicts.get(f"{self._prefix}/given_up/{self.failures}")
        if verdict is not None:
            self._next_barrier()
            raise GroupError(f"Rank {self.rank} came to {what} after the others had given up: {verdict}")

    def _next_barrier(self) -> None:
        self.failures += 1
        self._barrier_used = False

    def _read(self, folder: str) -> dict[int, str]:
        """Texts of the ranks that have begun this exchange."""
        found = {}
        for key, value in _client().key_value_dir_get(folder):
            number, _, text = value.partition(" ")
            if int(number) == self.count:
                found[int(key.rpartition("/")[2])] = text
        return found

    def _missing(self, why: str, present: dict[int, str], waited_s: float, what: str) -> GroupError:
        named = _LATE.search(why)
        late = [int(n) for n in re.findall(r"\d+", named[1])] if named else []
        late = late or [r for r in range(self.world_size) if r not in present]
        if not late:
            return GroupError(
                f"{what}: the coordination service failed: {why.splitlines()[0]} "
                "HINT: look for the first error among the other ranks."
            )
        ranks = ", ".join(map(str, late))
        return GroupError(
            f"Timeout waiting for peers in {what}: rank {ranks} of {self.world_size} did not come "
            f"(rank {self.rank} waited {waited_s:.1f} s). Every rank must make the same calls in the same "
            f"order. HINT: see what rank {late[0]} is doing; NCCL_TIMEOUT (seconds) allows longer waits."
        )


def _client() -> Any:
    client = jax_private.coordination_client()
    if client is None:
        raise GroupError(
            "the group has ended: jax.distributed is not running. "
            "HINT: call collectives between init_process_group() and destroy_process_group()."
        )
    return client
