"""Predicts the time of a step and an epoch for other numbers of replicas with an alpha-beta model.

A message of n bytes takes latency + n / bandwidth. An exchange of n bytes in total between R replicas
takes log2(R) latencies and n (R - 1) / R bytes one way; an all-reduce takes both ways. Nothing overlaps
with computation.
`python scripts/bench/plan.py` measures the error of the prediction for real runs on one machine.
Source: Thakur, Rabenseifner, Gropp 2005, doi:10.1177/1094342005051521 (recursive halving and doubling).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cyxjax.files import scaled
from cyxjax.observe.lines import counted, span
from cyxjax.sync.entry import Exchange
from cyxjax.sync.registry import STRATEGIES

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SAVE_BYTES_S = 1e9  # writing a state to a shared disk


class Wire(NamedTuple):
    """The connection between any two replicas."""

    bytes_per_s: float
    latency_s: float


def exchanges(params: Any) -> dict[str, list[Exchange]]:
    """What each strategy sends of float32 gradients with its default options.

    params: arrays or shapes.
    """
    import jax

    whole = 4.0 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    found = {name: one.sends(params, whole) for name, one in STRATEGIES.items() if one.sends is not None}
    return {name: sent for name, sent in found.items() if sent}


def step_s(sent: Sequence[Exchange], compute_s: float, replicas: int, wire: Wire) -> float:
    return compute_s + sum(_seconds(one, replicas, wire) for one in sent)


def _seconds(one: Exchange, replicas: int, wire: Wire) -> float:
    one_way = one.num_bytes * (replicas - 1) / replicas / wire.bytes_per_s
    return one.times * (1 + one.both_ways) * (one_way + math.ceil(math.log2(replicas)) * wire.latency_s)


class Work(NamedTuple):
    """What was measured here, and what is known about the experiment."""

    compute_s: float  # of a step, of one replica
    samples: int | None  # of an epoch
    samples_per_step: int  # of one replica
    state_bytes: int


def steps_s(
    work: Work, sent: Mapping[str, Sequence[Exchange]], wire: Wire, counts: Iterable[int]
) -> dict[int, dict[str, float]]:
    """Seconds per step, by number of replicas and strategy."""
    return {
        count: {name: step_s(parts, work.compute_s, count, wire) for name, parts in sent.items()}
        for count in counts
    }


def curve(
    work: Work, sent: Mapping[str, Sequence[Exchange]], wire: Wire, counts: Sequence[int]
) -> Iterator[str]:
    """Lines of at most 80 columns: milliseconds per step by strategy and replicas, and time per epoch."""
    yield f"a step in ms: computing {1000 * work.compute_s:.2f} (measured here), then sending;"
    yield (
        f"links of {scaled(wire.bytes_per_s, 'B/s')} and {1e6 * wire.latency_s:g} us between any two "
        "replicas:"
    )
    widths = {name: max(len(name), 7) for name in sent}
    yield f"  {'replicas':>8}" + "".join(f" {name:>{width}}" for name, width in widths.items())
    found = steps_s(work, sent, wire, counts)
    for count, took in found.items():
        yield f"  {count:>8}" + "".join(f" {1000 * took[name]:>{width}.2f}" for name, width in widths.items())
    yield "the fastest strategy that averages in every step, and an epoch with it:"
    for count, took in found.items():
        each_step = (name for name in took if STRATEGIES[name].averages_every_step)
        best = min(each_step, key=lambda name: took[name])
        epoch = ""
        if work.samples is not None:
            steps = -(-work.samples // (work.samples_per_step * count))
            epoch = f"{counted(steps, 'step')}, {span(steps * took[best])}"
        yield f"  {count:>8}  {best:<10}  {epoch}"


def save_every_s(save_s: float, mtbf_s: float) -> float:
    """The best interval between checkpoints of a job that fails once in `mtbf_s`.

    Source: Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def goodput(every_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time in steps that count, for a job that fails at random. Source: Daly, eq. 20."""
    if (every_s + save_s + restart_s) / mtbf_s > 500:
        return 0.0
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + save_s) / mtbf_s)
    return every_s / wall_s


class Saves(NamedTuple):
    """The best interval between saves of a job of `replicas` hosts, and its goodput."""

    replicas: int
    every_s: float
    goodput: float


def saves(work: Work, mtbf_s: float, restart_s: float, counts: Iterable[int]) -> Iterator[Saves]:
    """The best saves by number of replicas. mtbf_s: of one replica's host."""
    save_s = work.state_bytes / _SAVE_BYTES_S
    for count in counts:
        every_s = save_every_s(save_s, mtbf_s / count)
        yield Saves(count, every_s, goodput(every_s, save_s, restart_s, mtbf_s / count))


def failures(work: Work, mtbf_s: float, restart_s: float, counts: Sequence[int]) -> Iterator[str]:
    """Lines: how often to save, and the goodput. mtbf_s: of one replica's host."""
    save_s = work.state_bytes / _SAVE_BYTES_S
    yield f"a host fails once in {span(mtbf_s)}, a restart takes {span(restart_s)},"
    yield f"a save of {scaled(work.state_bytes, 'B')} {span(save_s)} (at 1 GB/s):"
    yield f"  {'replicas':>8}  {'save every':>16}  {'goodput':>7}"
    for count, every_s, share in saves(work, mtbf_s, restart_s, counts):
        yield f"  {count:>8}  {span(every_s):>16}  {share:>7.2%}"
