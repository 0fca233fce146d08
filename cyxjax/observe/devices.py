"""Peak FLOP/s and peak memory of devices."""

import resource
from collections.abc import Sequence

import jax

# Dense bfloat16 FLOP/s of a device by its `device_kind`, or the first words of it, from the vendors' data
# sheets; the first match is used. As usual, MFU is relative to this number at any precision.
_PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def peak_flops(device_kind: str) -> float:
    """The peak FLOP/s of a device of this kind; 0.0 if not known."""
    words = f"{device_kind} ".replace("-", " ")
    return next((peak for kind, peak in _PEAKS.items() if words.startswith(f"{kind} ")), 0.0)


def peak_memory_bytes(devices: Sequence[jax.Device]) -> int:
    """The peak memory of one of this process's `devices`; on CPU, of this process."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
