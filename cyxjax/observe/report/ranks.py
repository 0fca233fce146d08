"""The starts of a run and the ranks of the last one, from its events."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from cyxjax.observe.report.facts import RunFacts, number, whole
from cyxjax.observe.report.html import Markup, table


class Stretch(NamedTuple):
    """One process group at work: from a start to its end, or to its last sign of life."""

    first_s: float
    stop_s: float
    start_step: int
    stop_step: int
    world_size: int
    ended: bool  # it said so; else it was cut short
    ranks: list[dict[str, Any]]  # host, busy_s, waiting_s, by rank; [] where nobody said


def stretches(events: Sequence[dict[str, Any]]) -> list[Stretch]:
    """The starts of a run, in order, each with how it ended."""
    places = [i for i, event in enumerate(events) if event["event"] == "start"]
    return [_stretch(events[i:stop]) for i, stop in pairwise([*places, len(events)])]


def _stretch(events: Sequence[dict[str, Any]]) -> Stretch:
    start, last = events[0], events[-1]
    end = next((e for e in events if e["event"] == "end"), {})
    ranks = end.get("ranks") or start.get("ranks") or []
    return Stretch(
        number(start.get("at_unix_s")) or 0.0,
        number((end or last).get("at_unix_s")) or 0.0,
        whole(start.get("step"), 0),
        whole((end or last).get("step"), 0),
        max(1, min(whole(start.get("world_size"), 1), 100_000)),
        bool(end),
        [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else [],
    )


def shown(run: RunFacts) -> str:
    """A row for each start and one for each rank of the last; "" without events."""
    found = stretches(run.events)
    return _starts(found) + _table(found[-1]) if found else ""


def _starts(found: Sequence[Stretch]) -> str:
    rows = [
        (
            number_of,
            s.world_size,
            s.start_step,
            s.stop_step,
            f"{s.stop_s - s.first_s:,.1f} s",
            "ended" if s.ended else "cut short (until its last event)",
        )
        for number_of, s in enumerate(found, 1)
    ]
    return table(
        ("start", "processes", "from step", "to step", "time", "how it ended"), rows[-100:], "numbers"
    )


def _table(stretch: Stretch) -> str:
    """Who the ranks of the last start were, and how long each waited for the others."""
    rows = []
    for rank, values in enumerate(stretch.ranks[:1000]):
        busy_s, waiting_s = (number(values.get(name)) for name in ("busy_s", "waiting_s"))
        known = busy_s is not None and waiting_s is not None
        waited = f"{waiting_s / max(busy_s + waiting_s, 1e-9):.0%}" if known else "-"  # type: ignore[operator]
        busy = f"{busy_s:,.1f} s" if busy_s is not None else "-"
        rows.append((rank, values.get("host", "-"), busy, Markup(waited)))
    return table(("rank", "host", "busy by itself", "in steps, waiting included"), rows) if rows else ""
