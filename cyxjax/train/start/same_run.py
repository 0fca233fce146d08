"""Whether all ranks are about to train the same: configuration, compiled step, code and data; and whether a
resumed run goes on with what it was trained on.

Ranks that differ in one of these train to wrong numbers without an error, so every rank refuses, before a
step and before anything is written.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cyxjax.core.step import TrainState
from cyxjax.data.columns import map_leaves
from cyxjax.data.content import content_of, find_difference, in_form_of
from cyxjax.data.sources import Dataset
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import DesyncError
from cyxjax.launch.group.roster import disagreement
from cyxjax.launch.program import code_facts, own_modules
from cyxjax.train.feeding.feed import build_feed
from cyxjax.train.feeding.fit_data import FitData, is_shared
from cyxjax.train.feeding.loader_batches import refuse_other_programs, refuse_shared_samples
from cyxjax.train.hooks.ledger import Tape
from cyxjax.train.loop import Position
from cyxjax.train.settings import Settings
from cyxjax.train.start.prepare import Prepared

META = "same_run"
_PROGRAM = "the program of a step (the model's or the loss's code)"
_FEW = 3  # records that are compared where a call has no time to read more
# What may differ between ranks: where each reads and writes, what it shows, how it reads ahead.
_A_RANKS_OWN = (
    *("run_dir", "checkpoint_dir", "save_on_master_only", "keep_last", "keep_best", "cpu_devices"),
    *("verbose", "log_every_n_batches", "sinks", "wandb", "num_workers", "prefetch", "data"),
    *("compile_cache", "profile"),
)
# jax pins a host callback to the device of each process.
_OF_ONE_PROCESS = re.compile(r"^\s*sdy\.mesh @maximal.*$|mhlo\.backend_config = \{index.*?\}", re.MULTILINE)


def compared(
    group: ProcessGroup, prepared: Prepared, state: TrainState, exact: Mapping[str, str]
) -> dict[str, Any]:
    """What the data of a fit hold, once all ranks of the group have shown that they are about to do the same.

    state: as training starts with it. A model that does not take the first batch in training says so here.
    exact: what the bits of an exact run hang on here; {} of a plain one.
    Raises: DesyncError on every rank, with the values of each.
    """
    assert prepared.data is not None
    content = data_facts(prepared.data)
    program = prepared.built.program.train_step
    data = prepared.data
    first = _OneSample(data.train) if data.indexed else _OneStep(data.first)
    lowered = lower_step(program, state, data._replace(train=first, val=None), prepared.settings, group.mesh)
    if group.topology.world_size > 1:
        step = digest_of(lowered) if data.indexed else ""
        refuse_differences(group, config_facts(prepared.settings.told), content, step, exact)
        if isinstance(first, _OneStep):
            refuse_other_streams(group, prepared.data.train)
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
    values = {name: value for name, value in config.items() if name not in _A_RANKS_OWN}
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
        _compare_data(name, [rank["data"].get(name) for rank in ranks], to_the_bit=bool(exact))
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


def own_code() -> dict[str, str]:
    """A digest of each of the user's own modules, as they are when a fit begins."""
    return {name: digest for name, (digest, _) in own_modules().items()}


def to_meta(data: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps of code and data, for `changes`; own: as `own_code` said."""
    return {META: {"code": code_facts(), "data": data, "own": own}}


def changes(meta: Mapping[str, Any], data: Mapping[str, Any], *, to_the_bit: bool = False) -> list[str]:
    """A line each for the data and the code that a resumed run has changed since `meta` was written.

    to_the_bit: also for data that differ by a rounding.
    """
    return _read(meta, lambda kept: [*_other_data(kept, data, to_the_bit), *_other_code(kept)])


def changed_files(meta: Mapping[str, Any]) -> list[str]:
    """A line for the user's own files that are others than those that `meta` was written with."""
    return _read(meta, _told_of_files)


def changed_data(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """A line for each of the data, as they are read, that are others than those `meta` was written with."""
    hint = "HINT: name the data of then (`data.root`), or train on these."

    def told(kept: Mapping[str, Any]) -> list[str]:
        formed = {name: in_form_of(then, data[name]) for name, then in kept["data"].items() if name in data}
        return [f"{line} {hint}" for line in _other_data(kept, formed, False)]

    return _read(meta, told)


def _read(meta: Mapping[str, Any], compare: Callable[[Mapping[str, Any]], list[str]]) -> list[str]:
    """What `compare` finds; nothing where this was not kept, by a version before, or another program."""
    if META not in meta:
        return []
    try:
        return compare(meta[META])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ["WARNING: what the checkpoint says of its data and code cannot be read: not compared."]


def same_data(meta: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Whether the numbers of the training data are known to be those that `meta` was written with."""
    name = "training data"
    then, now = dict(meta.get(META) or {}).get("data", {}).get(name), data.get(name)
    if then is None or now is None:
        return False
    return find_difference({k: v for k, v in then.items() if k != "classes"}, now) is None


def _other_data(kept: Mapping[str, Any], data: Mapping[str, Any], to_the_bit: bool) -> Iterator[str]:
    for name, now in data.items():
        then = kept["data"].get(name)
        if then is not None and (found := find_difference(then, now, to_the_bit=to_the_bit)):
            what, before, after = found
            yield f"WARNING: the {name} changed since the checkpoint: {what}: {before} then, {after} now."


def _other_code(kept: Mapping[str, Any]) -> list[str]:
    now = code_facts()
    other = [name for name, digest in now.items() if kept["code"].get(name, digest) != digest]
    program = now.get("the program", "").split(" ")[0]  # named already
    other += [path for path in _other_files(kept) if Path(path).name != program]
    return [f"WARNING: changed since the checkpoint: {', '.join(other)}."] if other else []


def _other_files(kept: Mapping[str, Any]) -> list[str]:
    then = kept.get("own", {})
    return [path for name, (digest, path) in own_modules().items() if then.get(name, digest) != digest]


def _told_of_files(kept: Mapping[str, Any]) -> list[str]:
    files = _other_files(kept)
    if not files:
        return []
    return [
        f"WARNING: {', '.join(files)} changed since the checkpoint was written: what is loaded computes as "
        "the code says now. HINT: go back to the code of then, or train again."
    ]
