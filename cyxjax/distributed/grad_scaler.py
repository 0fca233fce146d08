"""`GradScaler`: loss scaling for float16, with torch's names and defaults."""

from typing import Any

import optax

from cyxjax.distributed.ddp_values import BoundLoss


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
        self._ddp: Any = None  # of the loss that was scaled last
        self._finite: bool | None = None  # of this step's gradients; None before they were looked at

    def scale(self, loss: BoundLoss) -> BoundLoss:
        """`loss`, the result of `ddp.loss` or of a cyxjax loss, times the scale."""
        self._ddp = loss.ddp
        return loss * self.get_scale()

    def unscale_(self, optimizer: Any = None) -> None:
        """Averages the gradients and divides them by the scale; `ddp.sync_gradients()` returns them.

        Further calls in the same step do nothing. optimizer: accepted, as in torch, but not used: the
        gradients are those of the loss that was scaled.
        """
        if self._finite is None:
            self._finite = not self._enabled or self._ddp.unscale_gradients(1.0 / self._scale)

    def step(self, optimizer: optax.GradientTransformation) -> bool:
        """Calls `ddp.update_parameters(optimizer)` if all ranks' gradients are finite; returns whether."""
        self.unscale_()
        if self._finite:
            self._ddp.update_parameters(optimizer)
        else:
            self._ddp.zero_grad()
        return bool(self._finite)

    def update(self, new_scale: float | None = None) -> None:
        """Adapts the scale to what `step` found, or sets it."""
        if new_scale is not None:
            self._scale = float(new_scale)
        elif self._enabled and self._finite is not None:
            self._good_steps = self._good_steps + 1 if self._finite else 0
            if not self._finite:
                self._scale *= self._backoff_factor
            elif self._good_steps == self._growth_interval:
                self._scale, self._good_steps = self._scale * self._growth_factor, 0
        self._finite = None

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
