"""`cx.amp`: mixed precision for hand-written loops. With the trainer, set `precision` instead."""

from cyxjax.core.precision import autocast
from cyxjax.distributed.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
