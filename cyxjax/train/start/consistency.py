"""Whether all ranks are about to train the same: configuration, compiled step, code and data.

Ranks that differ in one of these train to wrong numbers without an error, so every rank refuses, before a
step and before anything is written.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.config.compared import effect_of
from cyxjax.config.effects import PER_RANK
from cyxjax.core.step import TrainState
from cyxjax.data.columns import map_leaves
from cyxjax.data.content import content_of, find_difference
from cyxjax.data.sources import Dataset
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import DesyncError
from cyxjax.launch.group.roster import disagreement
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.feeding.feed import build_feed
from cyxjax.train.feeding.fit_data import FitData, is_shared
from cyxjax.train.feeding.loader_batches import refuse_other_programs, refuse_shared_samples
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.loop import Position
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.settings import Settings

_PROGRAM = "the program of a step (the model's or the loss's code)"
_FEW = 3  # records that are compared where a call has no time to read more
# jax pins a host callback to the device of each process.
_OF_ONE_PROCESS = re.compile(r"^\s*sdy\.mesh @maximal.*$|mhlo\.backend_config = \{index.*?\}", re.MULTILINE)


def compared(plan: Plan, program: Program, state: TrainState) -> dict[str, Any]:
    """What the data of a fit hold, once all ranks of the group have shown that they are about to do the same.

    state: as training starts with it. A model that does not take the first batch in training says so here.
    Raises: DesyncError on every rank, with the values of each.
    """
    group, data = plan.group, plan.data
    assert data is not None
    content = data_facts(data)
    first = _OneSample(data.train) if data.indexed else _OneStep(data.first)
    sampled = data._replace(train=first, val=None)
    lowered = lower_step(program.train_step, state, sampled, plan.settings, group.mesh)
    if group.topology.world_size > 1:
        step = digest_of(lowered) if data.indexed else ""
        refuse_differences(group, config_facts(plan.config), content, step, plan.fingerprint)
        if isinstance(first, _OneStep):
            refuse_other_streams(group, data.train)
            mine = [first.digest(), str(jax.tree.map(np.shape, data.first)), digest_of(lowered)]
            ranks = agree(group, "the first batches of loaders", note=mine)
            refuse_shared_samples([digest for digest, *_ in ranks])
            refuse_other_programs(_PROGRAM, [(shapes, program) for _, shapes, program in ranks])
    return content


def refuse_other_samples(group: ProcessGroup, call: str, data: Any) -> None:
    """Returns once all ranks have come to `call` with the same samples; each takes its share of them.

    Raises: DesyncError on all, with what differs.
    """
    if group.topology.world_size == 1:
        return
    content = content_of(data, _FEW) if isinstance(data, Dataset) else None
    _compare_data(f"data of {call}", agree(group, call, note=content))


def data_facts(data: FitData) -> dict[str, Any]:
    """What the training and validation samples hold."""
    return {name: content_of(part) for name, part in numbered(data).items()}


def numbered(data: FitData) -> dict[str, Dataset]:
    """Training and validation data by name; a loader, whose samples have no numbers, is not among them."""
    parts = {"training data": data.train, "validation data": data.val}
    return {name: part for name, part in parts.items() if isinstance(part, Dataset)}


def config_facts(config: Mapping[str, Any]) -> dict[str, str]:
    """What of a configuration has to be equal on all ranks, as JSON, by name."""
    values = {name: value for name, value in config.items() if effect_of(name) not in PER_RANK}
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}


def lower_step(step: Any, state: TrainState, data: FitData, settings: Settings, mesh: Mesh) -> Any:
    """The step's program for the first batch, not compiled; None where it cannot be lowered beforehand.

    data: as of a fit, with a first sample or the first step's batches in place of all.
    What lowering makes is kept by jax and serves the first step: measured, it costs 20 ms beside that.
    """
    if not hasattr(step, "lower"):
        return None
    feed = build_feed(data, settings.step, settings.reading, mesh, Tape())
    with closing(iter(feed.train(Position(), lambda: (0.0, False)))) as fed:  # type: ignore[type-var]
        return step.lower(state, next(fed).batch)


def digest_of(lowered: Any) -> str:
    """Equal for two ranks that are about to run the same program; "" for None."""
    if lowered is None:
        return ""
    return hashlib.sha256(_OF_ONE_PROCESS.sub("", lowered.as_text()).encode()).hexdigest()[:12]


class _OneStep:
    """A loader's batches of the first step alone; its sampler is told of no epoch."""

    def __init__(self, batches: Sequence[Any]):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def digest(self) -> str:
        """Equal where two ranks read the same samples; "" for rows that are all alike and tell nothing."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._batches[:1])]
        if not any((leaf[1:] != leaf[:1]).any() for leaf in leaves):
            return ""
        return hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def refuse_other_streams(group: ProcessGroup, train: Any) -> None:
    """Raises: DesyncError where ranks are to share one stream, and read others."""
    if not is_shared(train):
        return
    firsts = agree(group, "the first samples of streams", note=getattr(train, "loader", train).first_digest())
    if len(set(firsts)) > 1:
        raise DesyncError(
            "the streams of the ranks begin with different samples, and each rank would take a share of its "
            "own: most samples would never be seen. HINT: give all ranks the same stream, or "
            "cx.data.Rows(stream, shared=False) where each has its own part."
        )


class _OneSample:
    """A dataset's first sample in place of all: its shapes, without reading a batch."""

    def __init__(self, dataset: Dataset):
        self._length, self._first = len(dataset), dataset.take(np.zeros(1, np.int64))

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        inputs, targets = (map_leaves(lambda a: np.repeat(a, len(indices), 0), part) for part in self._first)
        return inputs, targets


def refuse_differences(
    group: ProcessGroup,
    config: Mapping[str, str],
    data: Mapping[str, Any],
    step: str,
    exact: Mapping[str, str],
) -> None:
    """Returns once all ranks have said the same. Raises: DesyncError on all, with the values of each rank."""
    note = {"config": config, "data": data, "step": step, "exact": exact}
    ranks = agree(group, "the start of training", note=note)
    for name in dict.fromkeys(name for rank in ranks for name in rank["config"]):
        _compare(f"{name} of the configuration", [rank["config"].get(name, "(none)") for rank in ranks])
    for name in dict.fromkeys(name for rank in ranks for name in rank["data"]):
        held = [rank["data"].get(name) for rank in ranks]
        _compare_data(name, held, to_the_bit=bool(exact))
        if group.topology.is_master:
            _tell_of_rounding(name, held)
    for name in exact:  # one configuration: all ranks have it or none
        _compare(f"{name} that the bits of this exact run hang on", [rank["exact"][name] for rank in ranks])
    _compare(_PROGRAM, [rank["step"] for rank in ranks])


def _compare(what: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        raise DesyncError(disagreement(what, dict(enumerate(values))))


def _compare_data(name: str, contents: list[dict[str, Any] | None], *, to_the_bit: bool = False) -> None:
    """All with rank 0's; the ranks that hold the same as rank 0 are said to."""
    first = contents[0]
    for rank, other in enumerate(contents):
        if first is None or other is None:
            _compare(f"the {name}", ["a loader" if c is None else "samples by number" for c in contents])
        elif found := find_difference(first, other, to_the_bit=to_the_bit):
            what, mine, its = found
            raise DesyncError(
                f"ranks differ in the {name}: {what}: {mine} on rank 0; {its} on rank {rank}. "
                "HINT: give every host the same files, in the same order."
            )


def _tell_of_rounding(name: str, contents: list[dict[str, Any] | None]) -> None:
    """A line where ranks that may train together hold floats that are not equal to the last bit."""
    first = contents[0]
    for rank, other in enumerate(contents):
        if first is not None and other is not None and (found := find_difference(first, other)):
            what, mine, its = found
            warn_on_stderr(
                f"WARNING: the {name} of rank {rank} are not those of rank 0 to the last bit: {what}: {mine} "
                f"on rank 0; {its} on rank {rank}. Processors may round a preprocessing differently. "
                "HINT: if they should be equal, give every host the same files, in the same order."
            )
            return
