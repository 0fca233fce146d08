"""The profiles of all ranks on one page: where each one's time went, and whom the others wait for."""

from collections.abc import Mapping, Sequence

from cyxjax.observe.lines import span
from cyxjax.observe.profile import Measured

_MOST_RANKS = 12  # rows of the table; those that the others wait for come first
_MOST_NAMES = 10
_HELD_UP = 0.1  # of the window: how much longer another rank's collectives take before it is said


def group_page(ranks: Sequence[Measured | str]) -> list[str]:
    """Lines. ranks: by rank what it measured, or why it has nothing."""
    known = {rank: found for rank, found in enumerate(ranks) if isinstance(found, Measured)}
    told = [f"rank {rank}: no profile: {why}" for rank, why in enumerate(ranks) if isinstance(why, str)]
    if not known:
        return [f"{len(ranks)} processes, none with a profile", *told]
    slowest = max(known, key=lambda rank: _each_ms(known[rank]))
    return [
        f"{len(ranks)} processes, {known[slowest].steps} steps, {_each_ms(known[slowest]):.2f} ms a step on "
        f"the slowest, rank {slowest} (tracing included)",
        "",
        *_rows(known),
        *told,
        *_held_up(known),
        "",
        "programs by time, on all ranks:",
        *_names({rank: found.programs for rank, found in known.items()}),
        "",
        "instructions by time, on all ranks:",
        *_names({rank: found.instructions for rank, found in known.items()}),
    ]


def _each_ms(found: Measured) -> float:
    return 1000 * found.seconds / max(found.steps, 1)


def _rows(known: Mapping[int, Measured]) -> list[str]:
    """The shares of each rank's window; collectives of what its instructions took."""
    shown = sorted(sorted(known, key=lambda rank: known[rank].wires_s)[:_MOST_RANKS])
    lines = ["rank   ms a step   input wait   host gaps   collectives   compiled"]
    for rank in shown:
        found = known[rank]
        wait, gaps = (
            part / found.seconds if found.seconds else 0.0 for part in (found.input_s, found.idle_s)
        )
        wires = found.wires_s / found.total_s if found.total_s else 0.0
        compiled = f"{found.compiled} in {span(found.compiled_s)}" if found.compiled else "0"
        lines.append(
            f"{rank:>4}{_each_ms(found):>12.2f}{wait:>13.1%}{gaps:>12.1%}{wires:>14.1%}   {compiled}"
        )
    more = len(known) - len(shown)
    return [*lines, f"{more} other ranks spent longer in collectives"] if more else lines


def _held_up(known: Mapping[int, Measured]) -> list[str]:
    """A rank that comes late to a collective spends least in it."""
    late, early = (pick(known, key=lambda rank: known[rank].wires_s) for pick in (min, max))
    late_s, early_s = known[late].wires_s, known[early].wires_s
    if early_s - late_s <= _HELD_UP * known[late].seconds:
        return []
    return [
        f"rank {late} is waited for: its collectives took {1000 * late_s:.2f} ms, "
        f"those of rank {early} {1000 * early_s:.2f} ms"
    ]


def _names(spent: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Each name's share of all, and the ranks where it took least and most."""
    whole = sum(sum(found.values()) for found in spent.values())
    total = {name: sum(f.get(name, 0.0) for f in spent.values()) for f in spent.values() for name in f}
    lines = []
    for name in sorted(total, key=lambda name: -total[name])[:_MOST_NAMES]:
        on = {rank: found.get(name, 0.0) for rank, found in spent.items()}
        least, most = min(on, key=lambda rank: on[rank]), max(on, key=lambda rank: on[rank])
        between = f"{1000 * on[least]:.2f} ms (rank {least}) to {1000 * on[most]:.2f} ms (rank {most})"
        lines.append(f"  {total[name] / whole if whole else 0.0:>6.1%}  {between:<44}  {name[:50]}")
    return lines
