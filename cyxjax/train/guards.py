"""The hooks that watch over a run rather than over its numbers, put in their places among the others."""

from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from cyxjax.core.mesh import num_replicas
from cyxjax.core.step import state_spec
from cyxjax.observe.console import Console
from cyxjax.train.build import Built
from cyxjax.train.config import DistributedTrainingConfig
from cyxjax.train.ledger_hook import FILE, LedgerHook
from cyxjax.train.loop import Hook
from cyxjax.train.sentinel_hook import SentinelHook


class Guards(NamedTuple):
    """What the guards of one run need to know."""

    ledger: LedgerHook
    run_folder: Path | None  # None: this rank records nothing
    mesh: Mesh
    built: Built
    config: DistributedTrainingConfig
    console: Console


def around(hooks: list[Hook], guards: Guards) -> list[Hook]:
    """`hooks`, whose last one saves, with the guards before it: what they find is part of what is saved."""
    *others, saves = hooks
    folder = guards.run_folder
    ledger = guards.ledger.begin(saves.wants_state, folder / FILE if folder else None)
    return [*others, *_sentinel(saves, guards), ledger, saves]


def _sentinel(saves: Hook, guards: Guards) -> list[Hook]:
    """None on one replica, which agrees with itself."""
    config = guards.config
    if num_replicas(guards.mesh) == 1 or not config.sentinel_every_n_steps:
        return []
    return [
        SentinelHook(
            guards.mesh,
            state_spec(guards.built.sync),
            every=config.sentinel_every_n_steps,
            policy=config.on_desync,
            saving=saves.wants_state,
            warn=guards.console.note,
        )
    ]
