"""The entry of a strategy: what the registry, `plan`, tests and the documentation read besides its code.

Each file of a strategy ends with its entries.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cyxjax.core.strategy import Sync
from cyxjax.core.trees import PyTree


class Exchange(NamedTuple):
    """A part of what a strategy sends: the whole vector's bytes, and how often per step."""

    both_ways: bool
    num_bytes: float
    times: float = 1.0


class Strategy(NamedTuple):
    """One value of `comm`. The defaults are those of a strategy that averages gradients without loss."""

    make: Callable[..., Sync]
    """(optimizer, **options) -> Sync"""
    row: tuple[str, str, str]
    """Of the documentation's table: what a replica sends in a step, its state, when to use it."""
    learns: Mapping[str, Any] | None
    """Options under which tests/device/test_convergence.py trains; None where another test shows that its
    parameters are those of `mean`."""
    sends: Callable[[PyTree, float], list[Exchange]] | None = None
    """(params, their bytes in float32) -> what a step with the default options sends, [] where it cannot
    train them; None: `plan` predicts no times for it"""
    averages_every_step: bool = True
    """Whether there is a mean gradient in every step."""
    cuts_leaves: bool = False
    """Whether the optimizer sees parts of leaves, cut as by `zero1`; `make` takes `params` (shapes) then."""
    in_memory_plan: bool = False
    """Whether `plan --device-gb` compiles it and may recommend it: the first that fits, in the registry's
    order."""
    lossless: Mapping[str, Any] | None = {}
    """Options with which it averages the contract test's integers without loss; None: there are none."""
    usual: Mapping[str, Any] | None = None
    """Options as in use: lossy, and with steps of several kinds; None: as `lossless`, else the defaults."""
