"""Stops training where the loss is not finite, and warns where all gradients are 0."""

import math

from cyxjax.core.metrics import GRAD_NORM
from cyxjax.errors import NonFiniteError
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.hooks.hook import EpochInfo, Hook, RunState, StepInfo


class TerminateOnNaN(Hook):
    """Ends the run with an error when a step's loss is NaN or infinite, or when so many steps in a row were
    left out that no loss scale is to blame; equal on all ranks."""

    def __init__(self, patience: int = 50) -> None:
        self._patience = patience  # steps left out in a row

    def on_start(self, moment: RunState) -> None:
        self._left_out = 0

    def on_step(self, info: StepInfo) -> None:
        # Python's numbers: this runs in each step, and numpy's are slow one by one.
        total, weight = info.sums[0].tolist()
        self._left_out = 0 if weight else self._left_out + 1
        if self._left_out >= self._patience:
            raise NonFiniteError(
                f"the gradients of the last {self._left_out} steps, up to {info.position.step}, were not "
                "finite and all were left out. HINT: look for NaN in the data, or train in bfloat16.",
                info.position,
            )
        loss = total / max(weight, 1)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss of step {info.position.step} (epoch {info.position.epoch}) is {loss}. "
                "HINT: lower the learning rate, set max_grad_norm, or look for NaN in the data and for "
                "labels that are no class; the last checkpoint is good.",
                info.position,
            )


class WarnsOfNoLearning(Hook):
    """Says once if the gradient was 0 in all steps of the first epoch that were measured."""

    def __init__(self, warns: bool) -> None:
        self._warns = warns

    def on_epoch(self, info: EpochInfo) -> None:
        if self._warns and info.train.get(GRAD_NORM) == 0:
            warn_on_stderr(
                "The gradient was 0 in every step that was measured: the loss does not depend on what is "
                "trained, and nothing is learned. HINT: look for stop_gradient, argmax, a cast to integers, "
                "a loss that is a constant, or a mask that leaves out every sample."
            )
        self._warns = False
