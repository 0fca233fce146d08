"""The hooks that watch over a run rather than over its numbers, put in their places among the others."""

from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from cyxjax.config.run import DistributedTrainingConfig, TrainConfig
from cyxjax.core.mesh import num_replicas
from cyxjax.observe.console import Console
from cyxjax.observe.history import DistributedTrainingHistory
from cyxjax.observe.records import Sink
from cyxjax.train.black_box import BlackBoxHook
from cyxjax.train.build import Built
from cyxjax.train.goodput import GoodputHook
from cyxjax.train.ledger_hook import FILE, LedgerHook
from cyxjax.train.loop import Hook
from cyxjax.train.rollback import uses_float16
from cyxjax.train.sentinel_hook import SentinelHook


class Guards(NamedTuple):
    """What the guards of one run need to know."""

    ledger: LedgerHook
    run_folder: Path | None  # None: this rank records nothing
    mesh: Mesh
    built: Built
    config: DistributedTrainingConfig
    console: Console
    sink: Sink
    history: DistributedTrainingHistory


def around(hooks: list[Hook], guards: Guards) -> list[Hook]:
    """`hooks`, whose last one saves, with the guards before it: what they find is part of what is saved."""
    *others, saves = hooks
    folder = guards.run_folder
    ledger = guards.ledger.begin(saves.wants_state, folder / FILE if folder else None)
    return [*_black_box(guards), *others, *_sentinel(saves, guards), ledger, saves, *_goodput(guards)]


def _goodput(guards: Guards) -> list[Hook]:
    """After the hook that saves: saves are part of where the time went."""
    if guards.run_folder is None:
        return []
    return [GoodputHook(guards.run_folder, guards.history, guards.sink, guards.console.note)]


def _black_box(guards: Guards) -> list[Hook]:
    """First of all: it writes before another hook ends the run. Only an experiment can be run again."""
    config = guards.config
    if guards.run_folder is None or not isinstance(config, TrainConfig):
        return []
    replicas, left_out_too = num_replicas(guards.mesh), not uses_float16(config)
    return [BlackBoxHook(config, guards.ledger.tape, replicas, left_out_too)]


def _sentinel(saves: Hook, guards: Guards) -> list[Hook]:
    """None on one replica, which agrees with itself."""
    config = guards.config
    if num_replicas(guards.mesh) == 1 or not config.sentinel_every_n_steps:
        return []
    return [
        SentinelHook(
            guards.built.sentinel,
            [device.process_index for device in guards.mesh.devices.flat],
            every=config.sentinel_every_n_steps,
            policy=config.on_desync,
            saving=saves.wants_state,
            warn=guards.console.note,
        )
    ]
