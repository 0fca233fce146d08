"""Records digests of an exact run's state every so many steps and at each save."""

from collections.abc import Callable

import numpy as np

from cyxjax.core.mesh import local_value
from cyxjax.core.sentinel import Sentinel, replicated_names
from cyxjax.observe.state_digests import DigestFile
from cyxjax.train.hooks.hook import Hook, Position, RunState


class DigestHook(Hook):
    """On every rank, for the sums over the bits are a collective of all; `file` is rank 0's alone."""

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
