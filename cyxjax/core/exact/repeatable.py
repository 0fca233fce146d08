"""Compiler options that make GPU programs deterministic; CPU programs are."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

OPTIONS = {"xla_gpu_deterministic_ops": True}
"""For the compiler: no sums by atomic additions, and no kernels chosen by timing them."""

_ASKING = (*OPTIONS, "xla_gpu_exclude_nondeterministic_ops")
_here: ContextVar[bool] = ContextVar("repeatable", default=False)
_everywhere = False


@contextmanager
def repeatable() -> Iterator[None]:
    """What is traced inside will be compiled with `OPTIONS`."""
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


def heed(flags: str) -> None:
    """Whether `flags` (XLA_FLAGS) ask for repeatable programs, for all that this process traces."""
    global _everywhere
    values = dict(flag.lstrip("-").partition("=")[::2] for flag in flags.split())
    _everywhere = any(values.get(name, "false").lower() not in ("false", "0") for name in _ASKING)


def must_repeat() -> bool:
    """Whether what is traced now must be deterministic; then no kernel without that property may be chosen.

    cuDNN's attention cannot, and XLA of jax 0.11.2 then ends with an IndexError of its own.
    """
    return _everywhere or _here.get()
