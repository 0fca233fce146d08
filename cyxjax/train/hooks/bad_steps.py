"""Hooks that end a run at a bad step: a loss that is not finite, or far above earlier losses."""

import math
import statistics
from collections import deque

import jax

from cyxjax.core.mesh import local_value
from cyxjax.core.trees import are_finite
from cyxjax.errors import LossSpikeError, NonFiniteError
from cyxjax.train.hooks.hook import Hook, Position, RunState, SavingHook, StepInfo

_are_finite = jax.jit(are_finite)


class TerminateOnNaN(SavingHook):
    """Ends the run with an error when a step's loss is NaN or infinite, when parameters to be saved are, or
    when more steps in a row were left out than a loss scale explains; the same on all ranks."""

    def __init__(self, patience: int = 50) -> None:
        self._patience = patience  # steps left out in a row

    def on_start(self, moment: RunState) -> None:
        self._left_out = 0

    def on_step(self, info: StepInfo) -> None:
        # Python's numbers: this runs in each step, and numpy's are slow one by one.
        total, weight = info.sums[0].tolist()
        self._left_out = self._left_out + 1 if info.left_out else 0
        if self._left_out >= self._patience:
            first, last = info.position.step - self._left_out + 1, info.position.step
            steps = f"step {last}" if first == last else f"steps {first} to {last}"
            raise NonFiniteError(
                f"the gradients of {steps} were not finite, and none was applied. "
                "HINT: look for NaN in the data, or train in bfloat16.",
                info.position,
            )
        loss = total / (weight or 1)  # no weight: every sample of the batch is ignored
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss of step {info.position.step} (epoch {info.position.epoch + 1}) is {loss}. "
                "HINT: lower the learning rate, set max_grad_norm, or look for NaN in the data and for "
                "labels that name no class.",
                info.position,
            )

    def on_state(self, moment: RunState) -> None:
        # The loss was finite but a gradient was not: the next step's loss would show it, after the save.
        if not local_value(_are_finite(moment.state.params)):
            raise NonFiniteError(
                f"the parameters after step {moment.position.step} are not finite, and are not saved: a "
                "gradient was not finite, though the loss was. HINT: look for roots and logarithms of 0 in "
                "the loss; with on_nonfinite=skip the run resumes, and leaves such steps out.",
                moment.position,
            )


class LossSpikeHook(Hook):
    """Ends the run with an error after `steps` steps in a row whose loss is not below `factor` x the median
    of the last `window` losses that were; the same on all ranks.

    It does not judge before the window is full, nor if the median is not positive, where a multiple of it is
    meaningless. Steps that were left out have no loss. The window survives a rollback: it belongs to the
    state that training continues from. Checkpoints store it, so a resumed run judges like an uninterrupted
    one. The rollback follows Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5.1; the detection is
    our own: the median of earlier losses separates noise from a lasting jump.
    """

    def __init__(self, factor: float, window: int, steps: int) -> None:
        self._factor, self._steps = factor, steps
        self._usual = deque[float](maxlen=window)
        self._high: list[tuple[int, float]] = []  # (step, loss)
        self._resumed = self._high

    def state_dict(self) -> tuple[list[float], list[tuple[int, float]]]:
        return list(self._usual), self._high

    def load_state_dict(self, state: tuple[list[float], list[tuple[int, float]]]) -> None:
        if not self._usual:  # not after a rollback
            usual, self._resumed = state
            self._usual.extend(usual)

    def on_start(self, moment: RunState) -> None:
        self._high, self._resumed = self._resumed, []

    def on_step(self, info: StepInfo) -> None:
        loss_sum, weight = info.sums[0]
        if info.left_out or not weight:
            return
        loss, limit = loss_sum / weight, self._limit()
        if limit is None or loss < limit:
            self._usual.append(loss)
            self._high = []
            return
        self._high.append((info.position.step, loss))
        if len(self._high) >= self._steps:
            raise self._error(info.position, limit)

    def _limit(self) -> float | None:
        """The limit of the loss; None before the window is full."""
        if len(self._usual) < self._usual.maxlen:  # type: ignore[operator]
            return None
        median = statistics.median(self._usual)
        return self._factor * median if median > 0 else None

    def _error(self, position: Position, limit: float) -> LossSpikeError:
        first, losses = self._high[0][0], [loss for _, loss in self._high]
        spread = f"{min(losses):.4g} to {max(losses):.4g}"
        found = f"the loss was {spread} in steps {first} to {position.step}"
        usual = f"{limit / self._factor:.4g}, the median of the {len(self._usual)} before"
        return LossSpikeError(
            f"{found}: for {len(losses)} steps in a row not below {self._factor:g} x {usual}. "
            "HINT: lower the learning rate, set max_grad_norm, or set on_loss_spike: ignore.",
            position,
            # The step before the first high loss may be what caused it; the state before that step is sound.
            good_step=first - 2,
            brief=f"{found}, usually {usual}",
        )
