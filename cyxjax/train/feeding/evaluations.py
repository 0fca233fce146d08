"""When a run is evaluated."""

from typing import NamedTuple


class Evaluations(NamedTuple):
    """When the state is evaluated: every so many epochs, every so many steps; 0: not by these."""

    every_epochs: int = 1
    every_steps: int = 0

    def after(self, step: int) -> bool:
        """Whether `step` is one of every so many."""
        return bool(self.every_steps) and step % self.every_steps == 0

    def at_end_of(self, epoch: int, epochs: int) -> bool:
        """Whether the end of the epoch, counted from 1, is one of every so many, or the last."""
        return bool(self.every_epochs) and (epoch % self.every_epochs == 0 or epoch == epochs)


EACH_EPOCH = Evaluations()
