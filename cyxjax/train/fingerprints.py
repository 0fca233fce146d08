"""Digests and plain values of what a run depends on: configuration, data, code, program, machine.

`comparison.py` compares them across ranks and with a checkpoint.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh

from cyxjax.config.compared import effect_of
from cyxjax.config.effects import PER_RANK
from cyxjax.core.exact.calls import Part, Parts, tree_of_each_part
from cyxjax.core.exact.step import PartsStep, by_device
from cyxjax.core.metrics import Metrics
from cyxjax.core.step import TrainState
from cyxjax.core.trees import PyTree, widened
from cyxjax.data.batches import HostBatch
from cyxjax.data.columns import map_leaves
from cyxjax.data.content import content_of
from cyxjax.data.sources import ArrayDataset, Dataset
from cyxjax.files import text_in
from cyxjax.launch.program import code_facts, software
from cyxjax.train.feeding.feed import build_feed
from cyxjax.train.feeding.fit_data import FitData, is_loader
from cyxjax.train.feeding.placing import NO_SIGNAL, Keying, unkeyed
from cyxjax.train.hooks.all_callbacks import in_the_step
from cyxjax.train.hooks.hook import Position
from cyxjax.train.program import Program, Recipe
from cyxjax.train.settings import Settings, StepPlan
from cyxjax.train.start.dispatch import placer_for
from cyxjax.train.start.optimizer_groups import for_trainer

_STEP_DIGITS, _EXACT_DIGITS = 12, 16
# jax pins a host callback to a device of each process, so these lines differ between processes.
_OF_ONE_PROCESS = re.compile(r"^\s*sdy\.mesh @maximal.*$|mhlo\.backend_config = \{index.*?\}", re.MULTILINE)


class Facts(NamedTuple):
    """What a run depends on, as JSON values; checkpoints store them."""

    config: dict[str, Any]  # configuration, optimizer, augmentation and callbacks: see `config_of`
    data: dict[str, Any] = {}  # summaries of the samples that are read by number, by name of the data
    own_code: dict[str, str] = {}  # digests of the user's modules
    program: dict[str, str] = {}  # of a step, and of what the settings decide about it: see `program_of`
    exact: dict[str, str] = {}  # what the bits of an exact run depend on: see `exact_of`


# ---- configuration and code -------------------------------------------------------------------------------


def config_of(values: Mapping[str, Any], recipe: Recipe, augment: str = "") -> dict[str, Any]:
    """The `values` of a configuration; for a program, whose configuration does not name them, also what is
    known about its optimizer, the callbacks that take part in the step, and its augmentation.
    """
    if "optimizer" in values:
        return dict(values)
    optimizer = for_trainer(recipe.optimizer)  # at the rate that was set
    made = {"lr": getattr(optimizer, "lr", None), **getattr(optimizer, "made_with", {})}
    about = {name: value for name, value in made.items() if _is_plain(value)}
    inside = ", ".join(type(one).__name__ for one in in_the_step(recipe.callbacks))
    known = {"optimizer": about, "augment": augment, "callbacks": inside or "none"}
    return {**values, **{name: value for name, value in known.items() if value}}


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it: a number, text, or a tuple of these."""
    return all(isinstance(one, int | float | str) for one in (value if isinstance(value, tuple) else [value]))


def equal_on_ranks(config: Mapping[str, Any]) -> dict[str, str]:
    """The part of a configuration that has to be equal on all ranks: JSON, by key."""
    values = {name: value for name, value in config.items() if effect_of(name) not in PER_RANK}
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}


# ---- data -------------------------------------------------------------------------------------------------


def data_of(data: FitData) -> dict[str, Any]:
    """Summaries of the training and validation samples by name; the samples of a loader have no numbers."""
    parts = {"training data": data.train, "validation data": data.val}
    return {name: content_of(part) for name, part in parts.items() if not (part is None or is_loader(part))}


def repeated(dataset: Dataset) -> ArrayDataset:
    """The first sample of `dataset` as all of its samples: their shapes, without reading a batch."""
    first = dataset.take(np.zeros(1, np.int64))
    return ArrayDataset(*map_leaves(lambda a: np.broadcast_to(a, (len(dataset), *a.shape[1:])), first))


def digest_of_first(batch: PyTree) -> str:
    """A digest that is equal if two ranks read the same samples; "" if all rows are equal."""
    leaves = jax.tree.leaves(batch)
    if not any((leaf[1:] != leaf[:1]).any() for leaf in leaves):
        return ""
    return hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)).hexdigest()


# ---- program ----------------------------------------------------------------------------------------------


def lower_step(
    program: Program, at_once: int, state: TrainState, data: FitData, settings: Settings, mesh: Mesh
) -> Any:
    """The program of the first dispatch, lowered but not compiled; None if it cannot be known.

    state: the state that training starts with. A model that does not take the first batch raises its error
    here. jax keeps the lowered program for the first step, so the extra cost is small: 20 ms, measured.
    """
    if not hasattr(program.train_step, "lower"):
        return None
    if data.reader is not None:
        first = data.reader.first
        batch = placer_for(settings.step, mesh).put(data.keying(first, 0))
        return program.train_step.lower(state, batch)
    shapes = data._replace(train=repeated(data.train), val=None)
    feed = build_feed(shapes, settings.step, settings.reading, mesh)
    with closing(iter(feed.train(Position(), lambda: NO_SIGNAL, at_once))) as fed:  # type: ignore[type-var]
        one = next(fed)
    if one.at is None:
        return program.train_step.lower(state, one.batch)
    return program.train_steps.lower(state, one.batch, 0, at_once)


def flops_of(lowered: Any) -> float:
    """FLOP of a step on one replica, from the result of `lower_step`; 0.0 for None. A loop counts once."""
    return 0.0 if lowered is None else float((lowered.cost_analysis() or {}).get("flops", 0.0))


def program_of(lowered: Any, step: StepPlan, metrics: Metrics) -> dict[str, str]:
    """Digests of the program that `lower_step` returned, and of all that decides it but the code of model,
    loss, optimizer and metrics. Empty for None.
    """
    if lowered is None:
        return {}
    given = step._replace(rate=step.rate._replace(own=None)), metrics.row_names, lowered.in_avals
    group = jax.process_count(), jax.local_device_count(), jax.default_backend()
    place = group, sorted(jax.config.values.items()), code_facts(), software()
    parts = {"of": str((given, place)), "text": _OF_ONE_PROCESS.sub("", lowered.as_text())}
    return {name: _digest(part.encode(), _STEP_DIGITS) for name, part in parts.items()}


# ---- what the bits of an exact run depend on --------------------------------------------------------------


def exact_of(step: PartsStep, data: FitData, state: TrainState, rows: int, threads: int) -> dict[str, str]:
    """name -> digest or text, of the programs of an exact step, compiled here for parts of `rows` samples.

    The text of the programs alone does not say it all (another number of threads left it equal, and the bits
    not), so there is a canary: the digest of what the part's program really gives on the first samples, with
    the parameters of `state`, which is given away. A difference is found in the process that has it.
    """
    device = step.layout.mesh.local_devices[0]
    here, total = by_device(state, [device])[0], np.float32(rows)
    parts = first_part(data.train, rows, data.keying)
    calls = step.part.calls(here, parts, total)
    # One program for all leaves: indexing them one by one takes two for each shape.
    made = jax.jit(lambda of_all: tree_of_each_part(of_all, range(1))[0])(calls([here], [parts], total)[0])
    # As if all parts had the same result as the first one.
    update = (here, jax.tree.map(widened, made), total, np.zeros(2, np.float32))
    lowered = {"program": calls.lower(here, parts, total), "update": step.writes[0].lower(*update)}
    moved = step.writes[0](*update)
    texts = {name: without_places(one.compile().as_text()) for name, one in lowered.items()}
    canary = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((made, moved)))
    return {
        "parts": f"{step.layout.num_parts} of {rows} samples, {calls.name}",
        **{name: _digest(text.encode(), _EXACT_DIGITS) for name, text in texts.items()},
        "machine": machine(device, threads),
        "canary": _digest(canary, _EXACT_DIGITS),
    }


def first_part(data: Dataset, rows: int, keying: Keying = unkeyed) -> Parts:
    """Part 0 alone, with the first samples of `data`, again from the start if they are fewer."""
    weight, places = np.ones(rows, np.float32), np.arange(rows)
    host = keying(HostBatch(*data.take(places % len(data)), weight, rows, places), 0)
    part = Part(np.int32(0), *host[:3])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], part)


def machine(device: jax.Device, threads: int) -> str:
    """Device, versions and threads: what determines a program's code and its order of additions."""
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    if device.platform != "cpu":
        return f"{device.device_kind}, {versions}"
    return f"{platform.machine()} {_instructions()}, {versions}, {threads} threads"


def _instructions() -> str:
    """Digest of the CPU's instruction sets; the CPU's name if the system does not list them."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text_in("/proc/cpuinfo"), re.MULTILINE)
    sets = " ".join(sorted(found[1].split())) if found else ""
    return _digest(sets.encode(), _EXACT_DIGITS) if found else platform.processor()


def without_places(text: str) -> str:
    """Optimized HLO without source locations."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text.split("\n\nFileNames")[0])
    return re.sub(r"(, )?(stack_frame_id=\d+|xla\.sdy\.meshes=\{[^}]*\})", "", text)


def _digest(data: bytes, digits: int) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]
