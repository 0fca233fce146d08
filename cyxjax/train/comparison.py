"""Compares the `Facts` of a run with those of the checkpoint that it resumes from, and across ranks.

A change since the checkpoint is a warning if the state still fits the run; an exact run refuses it. Ranks
that differ would train to wrong numbers without an error, so every rank refuses.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cyxjax.config.compared import differing_values, effect_of
from cyxjax.config.effects import ARRAYS
from cyxjax.data.content import content_of, find_difference
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError, ConfigError, DesyncError, OtherStateError
from cyxjax.launch.output import disagreement, unequal_facts
from cyxjax.launch.program import code_facts, own_modules
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.observe.state_digests import contradicted_leaves
from cyxjax.train.feeding.fit_data import FitData, is_loader, is_shared
from cyxjax.train.fingerprints import Facts, digest_of_first, equal_on_ranks
from cyxjax.train.plan import Plan, input_shapes
from cyxjax.train.settings import Settings

META = "same_run"  # key of a checkpoint: digests of its data and code
_FEW = 3  # records that are compared where reading more would take too long
_LONGEST = 250  # characters of a list of arrays
_OF_A_RUN = frozenset(
    ("model", "loss", "optimizer", "schedule", "warmup_steps", "lr_scaling", "base_batch_size")
    + ("seed", "shuffle", "augment", "precision", "max_grad_norm", "trainable", "lora")
)
"""Keys whose values make a run another one; a finished run may be started with other values of the rest."""


# ---- with a checkpoint ------------------------------------------------------------------------------------


def to_meta(facts: Facts) -> dict[str, Any]:
    """`facts` as the meta data of a checkpoint."""
    kept: dict[str, Any] = {"config": facts.config}
    kept[META] = {"code": code_facts(), "data": facts.data, "own": facts.own_code, "program": facts.program}
    return kept | ({"exact": facts.exact} if facts.exact else {})


def compare_with_checkpoint(
    meta: Mapping[str, Any], facts: Facts, settings: Settings, *, is_master: bool
) -> None:
    """Prints a line, on the master, for all that changed since the checkpoint whose meta data are `meta`.

    Raises: ConfigError for epochs of another length, in which the place in a stream is counted;
        CheckpointError for an exact run that would continue with different bits.
    """
    config, then = facts.config, meta.get("config", {})
    before, after = then.get("steps_per_epoch"), config.get("steps_per_epoch")
    if then and before != after:
        raise ConfigError(
            f"steps_per_epoch was {before} in the run that this one continues, and is {after}: the place "
            "in the stream is counted in these epochs. HINT: set it as before, or resume: never.",
            key="steps_per_epoch",
        )
    known = [*changed_keys(then, config), *_changed_code(meta)]
    lines = [
        *(known or _changed_program(meta, facts)),
        *changed_data(meta, facts.data),
    ]
    for line in lines if is_master else []:
        warn_on_stderr(f"WARNING: {line}.")  # not to the console: it may be switched off
    stored = meta.get("exact", {})
    if stored and facts.exact:
        train = {name: found for name, found in facts.data.items() if name == "training data"}
        judge(differences(stored, facts.exact) + changed_data(meta, train), settings, is_master=is_master)


def refuse_finished(meta: Mapping[str, Any], facts: Facts, folder: Path) -> None:
    """Returns if `facts` are those of the run, with the metadata `meta`, of which nothing is left to train.

    Raises: ConfigError with all that differs: the results of that run are not those of another one.
    """
    values = differing_values(meta.get("config", facts.config), facts.config, later=True)
    changed = [one for one in values if one[0].removeprefix("data.").partition(".")[0] in _OF_A_RUN]
    other = [f"{key} was {was}, is {now}" for key, was, now in changed]
    other = other or _changed_program(meta, facts)
    other += changed_data(meta, facts.data, to_the_bit=False)
    if other:
        raise ConfigError(
            f"the run in {folder} is over, and this one is another: {'; '.join(other)}. HINT: give this run "
            "a folder of its own (run_dir), or start over (resume: never). To continue from its parameters, "
            "name that run in init_from.",
            key="run_dir",
        )


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A clause for each key whose value in `now` differs from that in `then`.

    A key that `then` lacks comes from a later version and is not compared, unless it is an option that the
    user gives. If `then` is empty, there is no earlier run, and nothing is compared.
    """
    return [
        f"the configuration changed since the checkpoint: {key} was {was}, is {now_is}"
        for key, was, now_is in differing_values(then or now, now, later=True)
    ]


def changed_data(meta: Mapping[str, Any], data: Mapping[str, Any], *, to_the_bit: bool = True) -> list[str]:
    """A clause for each dataset that changed since `meta` was written. to_the_bit: see `find_difference`."""
    kept = meta.get(META, {}).get("data", {})
    return [
        "the {} changed since the checkpoint: {}: {} then, {} now".format(name, *found)
        for name, now in data.items()
        if kept.get(name) is not None and (found := find_difference(kept[name], now, to_the_bit=to_the_bit))
    ]


def changed_files(meta: Mapping[str, Any]) -> list[str]:
    """The user's own files that changed since `meta` was written."""
    kept = meta.get(META, {}).get("own", {})
    return [path for name, (digest, path) in own_modules().items() if kept.get(name, digest) != digest]


def _changed_code(meta: Mapping[str, Any]) -> list[str]:
    kept = meta.get(META, {}).get("code", {})
    now = {name: digest for name, digest in code_facts().items() if name != "the program"}  # a file of theirs
    other = [name for name, digest in now.items() if kept.get(name, digest) != digest] + changed_files(meta)
    return [f"changed since the checkpoint: {', '.join(other)}"] if other else []


def _changed_program(meta: Mapping[str, Any], facts: Facts) -> list[str]:
    """A clause if the program of a step is another one for the same settings."""
    then, now = meta.get(META, {}).get("program", {}), facts.program
    is_other = then.get("of") == now.get("of") and then.get("text") != now.get("text")
    what = "the model, the loss, the optimizer or a metric"
    return [f"the program of a step changed: {what}"] if is_other else []


def differences(stored: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A clause for each value that differs."""
    return [
        f"{name} was {stored[name]}, is {now[name]}"
        for name in now
        if name in stored and stored[name] != now[name]
    ]


def judge(found: list[str], settings: Settings, *, is_master: bool) -> None:
    """Returns if `found`, the differences that would change the bits of an exact run, is empty or accepted.

    Raises: CheckpointError, on all ranks, if it is not.
    """
    text = f"this exact run would continue with different bits: {'; '.join(found)}."
    if found and settings.guard.on_other_bits == "refuse":
        raise CheckpointError(
            f"{text} HINT: resume with the same settings on the same kind of machine and versions, move that "
            "step elsewhere, or accept it with exact=warn."
        )
    if found and is_master:
        warn_on_stderr(f"WARNING: {text}")


def compare_with_digests(directory: Path, step: int, settings: Settings, group: ProcessGroup) -> None:
    """Compares the stored `step` of an exact run with the digests that the run recorded; all ranks call it.

    Rank 0 reads, because it wrote both. Raises: CheckpointError on every rank if the step has different bits.
    """
    if not settings.step.is_exact or settings.run_folder is None:
        return
    bits = settings.run_folder.bits
    is_master = group.topology.is_master
    other = contradicted_leaves(directory, step, bits) if is_master else []
    other = agree(group, "comparing the checkpoint with its digests", note=other)[0]
    where = f"of step {step} in {directory}, {len(other)} leaves have different digests than in {bits.name}: "
    judge([where + other[0]] if other else [], settings, is_master=is_master)


@contextmanager
def naming_settings(plan: Plan, folder: Path, stored: Mapping[str, Any]) -> Iterator[None]:
    """A block whose OtherStateError first names the settings of `plan` that differ from a checkpoint's.

    stored: the metadata of the checkpoint, which is in `folder`. Raises: OtherStateError.
    """
    try:
        yield
    except OtherStateError as error:
        config, inputs = plan.facts.config, input_shapes(plan.inputs)
        values = differing_values(stored.get("config", config), config, later=True)
        other = [f"{key} was {was}, is {now}" for key, was, now in values if effect_of(key) in ARRAYS]
        if (then := stored.get("inputs", inputs)) != inputs:
            other.insert(0, f"a sample was {then}, is {inputs}")
        arrays = "; ".join(f"{name} {what}" for name, what in sorted(error.unlike.items()))
        raise OtherStateError(
            f"the checkpoint is of another run than this: {'; '.join(other) or 'its model or optimizer'} "
            f"({arrays[:_LONGEST]}). HINT: set it as it was; or start over with its parameters, in a new "
            f"trainer: init_from: {folder}, with another folder for this run's checkpoints.",
            error.unlike,
        ) from None


# ---- across ranks -----------------------------------------------------------------------------------------


def compare_ranks(group: ProcessGroup, facts: Facts, data: FitData) -> None:
    """Returns once all ranks are found to train with the same facts.

    Raises: DesyncError on every rank, with the values of each.
    """
    if group.topology.world_size == 1:
        return
    order = "as configured" if data.order is None else "seed={}, shuffle={}".format(*data.order)
    config = {f"{name} of the configuration": value for name, value in equal_on_ranks(facts.config).items()}
    exact = {
        f"{name} that the bits of this exact run depend on": value for name, value in facts.exact.items()
    }
    note: dict[str, Any] = {"first": "", "shapes": "", "data": facts.data}
    note["program"] = facts.program.get("text", "")
    note["settings"] = config | {
        "the training data": _kind(data.train),
        "the validation data": _kind(data.val),
        "the order of the training loader": order,
    }
    note["bits"] = exact
    if is_shared(data.train):
        what = "the first samples of one stream (cx.data.Rows(stream, shared=False) where each has its own)"
        note["bits"] = exact | {what: data.train.first_digest()}
    if not data.indexed:  # a loader, whose batches may have different shapes on each rank
        note["first"] = digest_of_first(data.first)
        note["shapes"] = str(jax.tree.map(np.shape, data.first))
    ranks = agree(group, "the start of training", note=note)
    _compare({n: rank["settings"] for n, rank in enumerate(ranks)})
    _compare_data([rank["data"] for rank in ranks], to_the_bit=bool(facts.exact))
    _compare({n: rank["bits"] for n, rank in enumerate(ranks)})
    _refuse_shared_samples([rank["first"] for rank in ranks])
    for shapes in dict.fromkeys(rank["shapes"] for rank in ranks):  # different shapes have different programs
        what = "the program of a step (the model's or the loss's code)"
        _compare({n: {what: rank["program"]} for n, rank in enumerate(ranks) if rank["shapes"] == shapes})


def compare_samples(group: ProcessGroup, call: str, data: Any) -> None:
    """Returns once all ranks have called `call` with the same samples; each takes its share of them.

    Raises: DesyncError on all ranks, naming what differs.
    """
    if group.topology.world_size == 1:
        return
    name = f"data of {call}"
    note = {
        "kind": {f"the {name}": _kind(data)},
        "data": {} if is_loader(data) else {name: content_of(data, _FEW)},
    }
    ranks = agree(group, call, note=note)
    _compare({n: rank["kind"] for n, rank in enumerate(ranks)})
    _compare_data([rank["data"] for rank in ranks])


def _compare(facts: Mapping[int, Mapping[str, object]]) -> None:
    """Raises: DesyncError naming the first of `facts` that is not equal on all ranks. facts: by rank."""
    if why := next(unequal_facts(facts), ""):
        raise DesyncError(why)


def _compare_data(ranks: list[dict[str, Any]], *, to_the_bit: bool = False) -> None:
    """Compares the contents on all ranks, by the same names, with rank 0's."""
    for name, first in ranks[0].items():
        for rank, contents in enumerate(ranks):
            if found := find_difference(first, contents[name], to_the_bit=to_the_bit):
                what, mine, its = found
                raise DesyncError(disagreement(f"the {name}: {what}", {0: mine, rank: its}))


def _kind(data: Any) -> str:
    if data is None:
        return "none"
    return "a loader" if is_loader(data) else "samples by number"


def _refuse_shared_samples(digests: list[str]) -> None:
    """digests: of the first batch on each rank. Raises: DesyncError if two ranks read the same one."""
    for rank, digest in enumerate(digests):
        if digest and digest in digests[:rank]:
            raise DesyncError(
                f"the loaders of ranks {digests.index(digest)} and {rank} begin with the same samples: each "
                "would be used more than once per epoch. HINT: give the loader a DistributedSampler, or "
                "pass the dataset itself to fit."
            )
