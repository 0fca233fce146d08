"""The hooks that watch over a run rather than over its numbers, put in their places among the others."""

from pathlib import Path
from typing import NamedTuple

from cyxjax.train.ledger_hook import FILE, LedgerHook
from cyxjax.train.loop import Hook


class Guards(NamedTuple):
    """What the guards of one run need to know."""

    ledger: LedgerHook
    run_folder: Path | None  # None: a fit without a run folder


def around(hooks: list[Hook], guards: Guards) -> list[Hook]:
    """`hooks`, whose last one saves, with the guards before it: what they find is part of what is saved."""
    *others, saves = hooks
    folder = guards.run_folder
    ledger = guards.ledger.begin(saves.wants_state, folder / FILE if folder else None)
    return [*others, ledger, saves]
