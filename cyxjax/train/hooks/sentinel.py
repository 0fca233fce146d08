"""Hooks that read the bits of the state: one compares the replicas, one records digests of an exact run."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from cyxjax.core.mesh import local_value
from cyxjax.core.sentinel import Difference, Sentinel, differences, replicated_names
from cyxjax.core.step import TrainState
from cyxjax.errors import DesyncError
from cyxjax.observe.state_digests import DigestFile
from cyxjax.train.hooks.hook import Hook, Position, RunState

_SHOWN = 3  # leaves named in a message; the rest are counted


class SentinelHook(Hook):
    """Compares the replicas every N steps and before each save, so that no diverged replica is saved.

    Raises DesyncError where they differ; or warns; or gives all of them what most of them hold.

    ranks: of each replica.
    saving: (position, asked to save) -> whether a checkpoint is about to be written.
    """

    def __init__(
        self,
        sentinel: Sentinel,
        ranks: list[int],
        *,
        every: int,
        policy: Literal["abort", "warn", "heal"],
        saving: Callable[[Position, bool], bool],
        warn: Callable[[str], None],
    ):
        self._sentinel, self._ranks, self._policy, self._warn = sentinel, ranks, policy, warn
        self._every, self._saving = every, saving
        self._named: set[str] = set()
        self._seen = -1  # the step that was compared last

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        return position.step % self._every == 0 or self._saving(position, asked_to_save)

    def on_state(self, moment: RunState, ended: bool = False) -> TrainState | None:
        self._seen = moment.position.step
        names = replicated_names(moment.state, self._sentinel.spec)
        found = differences(local_value(self._sentinel.fingerprints(moment.state)), names)
        if not found:
            return None
        text = describe(found, moment.position.step, self._ranks)
        if self._policy == "heal" and not ended and all(d.source is not None for d in found):
            self._warn(f"WARNING: {text} All replicas were set to the value of the majority.")
            return self._healed(moment.state, found, names)
        if self._policy == "warn":
            self._warn_once(text, found)
            return None
        raise DesyncError(f"{text} {_hint(self._policy)}")

    def on_end(self, moment: RunState, finished: bool) -> None:
        if moment.position.step != self._seen:
            self.on_state(moment, ended=True)  # what is found now is too late to heal

    def _healed(self, state: TrainState, found: list[Difference], names: list[str]) -> TrainState:
        sources = np.zeros(len(names), np.int32)
        for difference in found:
            assert difference.source is not None
            sources[names.index(difference.leaf)] = difference.source
        return self._sentinel.heal(state, sources)

    def _warn_once(self, text: str, found: list[Difference]) -> None:
        new = {difference.leaf for difference in found} - self._named
        if new:
            self._named |= new
            self._warn(f"WARNING: {text} Training goes on; these leaves are not named again.")


def describe(found: list[Difference], step: int, ranks: list[int]) -> str:
    """One sentence that names leaves, replicas, their ranks, and the step; `ranks` of each replica."""
    parts = [f"{d.leaf} on {_places(d.replicas, ranks)}" for d in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more leaves" if len(found) > _SHOWN else ""
    against = "most others hold" if found[0].source is not None else f"rank {ranks[0]} holds"
    return f"Gradients differ across ranks: after step {step} {', '.join(parts)}{more} is not what {against}."


def _places(replicas: tuple[int, ...], ranks: list[int]) -> str:
    return ", ".join(f"rank {ranks[r]} (replica {r})" for r in replicas)


def _hint(policy: str) -> str:
    if policy == "heal":
        return "It is too late to heal, or there is no majority. HINT: run the same command again."
    return (
        "HINT: look for model code that depends on the rank, the clock or unseeded random numbers; if there "
        "is none, suspect that device's memory. The last checkpoint is from before."
    )


class DigestHook(Hook):
    """Records digests of an exact run's state every so many steps and at each save.

    On every rank, for the sums over the bits are a collective of all; `file` is rank 0's alone.
    """

    def __init__(
        self,
        sentinel: Sentinel,
        file: DigestFile | None,
        every: int,
        saving: Callable[[Position, bool], bool] = lambda position, asked: False,
    ):
        self._sentinel, self._file, self._every, self._saving = sentinel, file, every, saving
        self._newest = -1

    def on_start(self, moment: RunState) -> None:
        self._newest = moment.position.step
        if self._file is not None:
            self._file.begin(moment.position.step)

    def wants_state(self, position: Position, asked_to_save: bool) -> bool:
        return position.step % self._every == 0 or self._saving(position, asked_to_save)

    def on_end(self, moment: RunState, finished: bool) -> None:
        if moment.position.step != self._newest:  # the last save
            self.on_state(moment)

    def on_state(self, moment: RunState) -> None:
        self._newest = moment.position.step
        sums = np.asarray(local_value(self._sentinel.fingerprints(moment.state)))[0]  # of the first replica
        if self._file is not None:
            names = replicated_names(moment.state, self._sentinel.spec)
            digests = {name: f"{a:08x}{b:08x}" for name, (a, b) in zip(names, sums.tolist(), strict=True)}
            self._file.add(moment.position.step, digests)
