"""`cx.amp`: mixed precision for hand-written loops. The trainer's `precision` is the short way."""

from cyxjax.core.precision import autocast
from cyxjax.distributed.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
