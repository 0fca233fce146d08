"""`cx.amp`: mixed precision for hand-written loops. The trainer's `precision` is the short way."""

from cyxjax.core.model.autocast import autocast
from cyxjax.distributed.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
