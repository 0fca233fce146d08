"""Hooks that read the bits of the state: one compares the replicas, one records digests of an exact run."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from cyxjax.core.sentinel import Difference, Sentinel, differences, replicated_names
from cyxjax.core.step import TrainState
from cyxjax.errors import DesyncError
from cyxjax.observe.records import add_line, once
from cyxjax.train.hooks.hook import RunState, SavingHook


class SentinelHook(SavingHook):
    """Compares the replicas every N steps and before each save, so that no diverged replica is saved.

    If they differ, it raises DesyncError, warns, or sets all replicas to the value of the majority.

    ranks: the rank of each replica.
    """

    def __init__(
        self,
        sentinel: Sentinel,
        ranks: list[int],
        *,
        every: int,
        policy: Literal["abort", "warn", "heal"],
        warn: Callable[[str], None],
    ):
        self._sentinel, self._ranks, self._policy, self._warn = sentinel, ranks, policy, warn
        self.every, self._warned = every, False

    def on_start(self, moment: RunState) -> None:
        self._seen = -1  # the step that was compared last

    def on_state(self, moment: RunState, ended: bool = False) -> TrainState | None:
        self._seen = moment.position.step
        names = replicated_names(moment.state, self._sentinel.spec)
        found = differences(self._sentinel.fingerprints(moment.state), names)
        if not found:
            return None
        text = describe(found, moment.position.step, self._ranks)
        if self._policy == "heal" and not ended and all(d.source is not None for d in found):
            self._warn(f"WARNING: {text} All replicas were set to the value of the majority.")
            return self._healed(moment.state, found, names)
        if self._policy == "warn":
            if not self._warned:
                self._warn(f"WARNING: {text} Training continues; this is printed once.")
            self._warned = True
            return None
        late = "It is too late to heal, or there is no majority. " if self._policy == "heal" else ""
        raise DesyncError(
            f"{text} {late}HINT: look for model code that depends on the rank, the clock or unseeded random "
            "numbers; if there is none, suspect that device's memory. The last checkpoint predates this."
        )

    def on_end(self, moment: RunState, finished: bool) -> None:
        if moment.position.step != self._seen:
            self.on_state(moment, ended=True)  # a difference found now is too late to heal

    def _healed(self, state: TrainState, found: list[Difference], names: list[str]) -> TrainState:
        source = {difference.leaf: difference.source for difference in found}
        return self._sentinel.heal(state, np.array([source.get(name, 0) for name in names], np.int32))


def describe(found: list[Difference], step: int, ranks: list[int]) -> str:
    """A sentence that names the step, the first leaf, its replicas and their ranks (`ranks`, by replica)."""
    first = found[0]
    places = ", ".join(f"rank {ranks[r]} (replica {r})" for r in first.replicas)
    against = "most others hold" if first.source is not None else f"rank {ranks[0]} holds"
    return (
        f"Gradients differ across ranks: after step {step} {first.leaf} on {places} is not what {against} "
        f"({len(found)} leaves in all)."
    )


class DigestHook(SavingHook):
    """Records digests of an exact run's state every `every` steps and at each save.

    It runs on every rank, because the sums over the bits are a collective operation. path: the file that
    rank 0 appends to, None on other ranks; on a write error, `warn` gets a line and training continues.
    """

    def __init__(
        self,
        sentinel: Sentinel,
        path: Path | None,
        every: int,
        warn: Callable[[str], None],
    ):
        self._sentinel, self._path, self.every = sentinel, path, every
        self._warn, self._newest = once(warn), -1

    def on_start(self, moment: RunState) -> None:
        self._newest = moment.position.step
        if self._path is not None:
            add_line(self._path, {"begin": moment.position.step}, self._warn)

    def on_end(self, moment: RunState, finished: bool) -> None:
        if moment.position.step != self._newest:  # the last save
            self.on_state(moment)

    def on_state(self, moment: RunState) -> None:
        self._newest = moment.position.step
        sums = self._sentinel.fingerprints(moment.state)[0]  # of the first replica
        if self._path is not None:
            names = replicated_names(moment.state, self._sentinel.spec)
            digests = {name: f"{a:08x}{b:08x}" for name, (a, b) in zip(names, sums.tolist(), strict=True)}
            add_line(self._path, {"step": moment.position.step, "digests": digests}, self._warn)
