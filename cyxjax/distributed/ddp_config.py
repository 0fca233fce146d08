"""Options of `DistributedDataParallel`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from cyxjax.errors import ConfigError


@dataclass(slots=True)
class DDPConfig:
    """Options of `DistributedDataParallel`; all have torch's meaning, or say here what became of it."""

    broadcast_parameters: bool = True
    """Rank 0's first parameters become everybody's. Shapes are compared in any case."""
    bucket_size_mb: float = 25
    """MiB a reduction on GPUs; on CPUs leaves up to 1 MiB travel as one buffer, larger ones alone."""
    find_unused_parameters: bool = False
    """Nothing to choose: a leaf that the loss does not reach has a gradient of zeros; no rank waits."""
    gradient_as_bucket_view: bool = True
    """Nothing to choose: XLA reduces gradients where they lie."""
    comm_hook: Callable[[Any], Any] | tuple[Any, Callable[[Any], Any]] | None = None
    """A communication hook, or (its state, the hook); see `register_comm_hook`."""

    def check(self) -> "DDPConfig":
        """Itself. Raises: ConfigError naming the field."""
        if not self.bucket_size_mb > 0:
            raise ConfigError(f"bucket_size_mb={self.bucket_size_mb}: expected a positive size. HINT: 25.")
        return self

    def with_torch_names(
        self,
        bucket_cap_mb: float | None,
        find_unused_parameters: bool | None,
        gradient_as_bucket_view: bool | None,
    ) -> "DDPConfig":
        """A copy with what was given by torch's keyword arguments."""
        given: dict[str, Any] = {
            "bucket_size_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def check_device_ids(device_ids: Any, num_local: int) -> None:
    """Raises ConfigError unless `device_ids` could name devices; which ones a process owns is settled before.

    A process that owns one device uses it, whatever its number is called.
    """
    if device_ids is None:
        return
    numbers = list(device_ids) if isinstance(device_ids, list | tuple | range) else [device_ids]
    bad = [d for d in numbers if isinstance(d, bool) or not isinstance(d, int | jax.Device)]
    negative = [d for d in numbers if isinstance(d, int) and d < 0]
    if bad or negative or len(numbers) > num_local:
        raise ConfigError(
            f"device_ids={device_ids!r}: expected up to {num_local} device numbers, 0 or more: this process "
            f"owns {num_local}. HINT: leave device_ids out: devices were chosen when the group was formed."
        )


def compiler_options(platform: str, bucket_size_mb: float) -> dict[str, Any] | None:
    """Compiler options for the size of a reduction; None on CPUs."""
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    return {"xla_gpu_all_reduce_combine_threshold_bytes": str(round(bucket_size_mb * 2**20))}
