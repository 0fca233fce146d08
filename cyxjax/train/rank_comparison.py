"""Compares the `Facts` of a run across ranks, before a step and before anything is written.

Ranks that differ in one of these train to wrong numbers without an error, so every rank refuses.
"""

from typing import Any

import jax
import numpy as np

from cyxjax.data.content import content_of, find_difference
from cyxjax.data.sources import Dataset
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import DesyncError
from cyxjax.launch.group.roster import disagreement
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.train.feeding.fit_data import FitData, is_shared
from cyxjax.train.fingerprints import Facts, OneStep, equal_on_ranks, program_of

_PROGRAM = "the program of a step (the model's or the loss's code)"
_FEW = 3  # records that are compared where a call has no time to read more


def compare_ranks(group: ProcessGroup, facts: Facts, data: FitData, lowered: Any) -> None:
    """Returns once all ranks were found to train on the same facts. lowered: see `program_of`.

    Raises: DesyncError on every rank, with the values of each.
    """
    if group.topology.world_size == 1:
        return
    program = program_of(lowered)
    compare_facts(group, facts, program if data.indexed else "")
    if not data.indexed:
        _compare_streams(group, data.train)
        mine = [OneStep(data.first).digest(), str(jax.tree.map(np.shape, data.first)), program]
        ranks = agree(group, "the first batches of loaders", note=mine)
        refuse_shared_samples([digest for digest, *_ in ranks])
        refuse_other_programs([(shapes, digest) for _, shapes, digest in ranks])


def compare_facts(group: ProcessGroup, facts: Facts, program: str) -> None:
    """Raises: DesyncError on all ranks, with the values of each. program: "" where shapes may differ."""
    note = {"config": equal_on_ranks(facts.config), "data": facts.data, "step": program, "exact": facts.exact}
    ranks = agree(group, "the start of training", note=note)
    for name in dict.fromkeys(name for rank in ranks for name in rank["config"]):
        _compare(f"{name} of the configuration", [rank["config"].get(name, "(none)") for rank in ranks])
    for name in dict.fromkeys(name for rank in ranks for name in rank["data"]):
        held = [rank["data"].get(name) for rank in ranks]
        _compare_data(name, held, to_the_bit=bool(facts.exact))
        if group.topology.is_master:
            _warn_of_rounding(name, held)
    for name in facts.exact:  # one configuration: all ranks have it or none
        _compare(f"{name} that the bits of this exact run depend on", [rank["exact"][name] for rank in ranks])
    _compare(_PROGRAM, [rank["step"] for rank in ranks])


def compare_samples(group: ProcessGroup, call: str, data: Any) -> None:
    """Returns once all ranks have come to `call` with the same samples; each takes its share of them.

    Raises: DesyncError on all, with what differs.
    """
    if group.topology.world_size == 1:
        return
    content = content_of(data, _FEW) if isinstance(data, Dataset) else None
    _compare_data(f"data of {call}", agree(group, call, note=content))


def _compare(what: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        raise DesyncError(disagreement(what, dict(enumerate(values))))


def _compare_data(name: str, contents: list[dict[str, Any] | None], *, to_the_bit: bool = False) -> None:
    """Compares all contents with rank 0's."""
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


def _warn_of_rounding(name: str, contents: list[dict[str, Any] | None]) -> None:
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


def _compare_streams(group: ProcessGroup, train: Any) -> None:
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


def refuse_shared_samples(digests: list[str]) -> None:
    """digests: of the first batch on each rank. Raises: DesyncError where two ranks read the same one."""
    for rank, digest in enumerate(digests):
        if digest and digest in digests[:rank]:
            raise DesyncError(
                f"the loaders of ranks {digests.index(digest)} and {rank} begin with the same samples: each "
                "would be trained on more than once an epoch. HINT: give the loader a DistributedSampler, or "
                "pass the dataset itself to fit."
            )


def refuse_other_programs(made: list[tuple[str, str]]) -> None:
    """made: (shapes of the first step's batches, digest of its program) of each rank.

    Raises: DesyncError where batches of one shape have other programs; of other shapes nothing is known.
    """
    for shapes in dict.fromkeys(shapes for shapes, _ in made):
        found = {rank: digest for rank, (own, digest) in enumerate(made) if own == shapes}
        if len(set(found.values())) > 1:
            raise DesyncError(disagreement(_PROGRAM, found))
