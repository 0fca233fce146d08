"""`GradScaler`: loss scaling for float16, with torch's names and defaults."""

from typing import Any

import optax

from cyxjax.distributed.ddp_values import BoundLoss
from cyxjax.errors import GroupError


class GradScaler:
    """Multiplies losses by a scale that adapts: halved after gradients that are not finite (that step is
    skipped, on all ranks), doubled after `growth_interval` good steps in a row.

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Source: torch.amp.GradScaler (same defaults). bfloat16 and float32 need no scaling; with
    `enabled=False` losses and gradients are passed on unchanged.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._scale = float(init_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._enabled = growth_interval, enabled
        self._good_steps = 0
        self._last: Any = None  # the ddp of the loss that was scaled last
        self._found: dict[Any, bool] = {}  # since `update`: ddp -> whether its gradients were finite
        self._stepped: set[Any] = set()  # since `update`

    def scale(self, loss: BoundLoss) -> BoundLoss:
        """`loss`, the result of `ddp.loss` or of a cyxjax loss, times the scale."""
        self._last = loss.ddp
        return loss * self.get_scale()

    def unscale_(self, optimizer: Any = None) -> bool:
        """Averages the gradients and divides them by the scale; `ddp.sync_gradients()` returns them.

        Returns whether they are finite on all ranks. Further calls in the same step do nothing. optimizer:
        as for `step`.
        """
        if not self._enabled:
            return True
        ddp = self._ddp(optimizer)
        self._found[ddp] = ddp.unscale_gradients(1.0 / self._scale)
        return self._found[ddp]

    def step(self, optimizer: optax.GradientTransformation) -> bool:
        """Calls `ddp.update_parameters(optimizer)` if all ranks' gradients are finite; returns whether.

        The ddp is the one that the optimizer was made with, or else that of the loss that was scaled last.
        Raises: GroupError for a second step of it before `update`.
        """
        ddp = self._ddp(optimizer)
        if self._enabled and ddp in self._stepped:
            raise GroupError(
                "GradScaler.step was called twice for one ddp before update(): the scale would not adapt. "
                "HINT: call scaler.update() once after the steps of all optimizers."
            )
        self._stepped.add(ddp)
        finite = self.unscale_(optimizer)
        if finite:
            ddp.update_parameters(optimizer)
        else:
            ddp.zero_grad()
        return finite

    def update(self, new_scale: float | None = None) -> None:
        """Adapts the scale to the gradients that were unscaled since the last `update`, or sets it."""
        finite = all(self._found.values())
        if new_scale is not None:
            self._scale = float(new_scale)
        elif self._found:
            self._good_steps = self._good_steps + 1 if finite else 0
            if not finite:
                self._scale *= self._backoff_factor
            elif self._good_steps == self._growth_interval:
                self._scale, self._good_steps = self._scale * self._growth_factor, 0
        self._found, self._stepped = {}, set()

    def get_scale(self) -> float:
        """The current scale; 1 when not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, float | int]:
        """What `load_state_dict` takes: the scale and the good steps since it changed."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._scale, self._good_steps = float(saved["scale"]), int(saved["good_steps"])

    def _ddp(self, optimizer: Any) -> Any:
        own = getattr(optimizer, "ddp", None)
        return self._last if own is None else own
