"""What a compiled step sends and holds in memory, read from the compiled program, not estimated."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from cyxjax.core.mesh import HOST_MEMORY
from cyxjax.files import scaled

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.+?) ({_KINDS})(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]<=)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_EVERYONE = re.compile(r"(?:num_partitions|replica_count)=(\d+)")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Collective:
    """One instruction by which replicas exchange values."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, ...
    payload_bytes: int  # the whole vector that is reduced, gathered or exchanged, once
    num_replicas: int
    times: int = 1  # per call of the program; in a loop of unknown length: 1
    in_loop: bool = False
    in_branch: bool = False  # runs only in some calls
    num_arrays: int = 1  # each is a separate transfer with gloo

    @property
    def sent_bytes(self) -> int:
        """Bytes that one replica sends each time, with ring algorithms, which need the least."""
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.payload_bytes * (self.num_replicas - 1) // max(self.num_replicas, 1)

    def line(self) -> str:
        """`all-reduce      23.9 MB payload, 23.9 MB sent`."""
        notes = [f"{self.num_arrays} arrays"] if self.num_arrays > 1 else []
        notes += [f"{self.times} times"] if self.times > 1 else []
        notes += ["in a loop"] if self.in_loop else []
        notes += ["in some steps only"] if self.in_branch else []
        sizes = (
            f"{scaled(self.payload_bytes, 'B'):>9} payload, "
            f"{scaled(self.sent_bytes, 'B'):>9} sent per replica"
        )
        return f"{self.kind:15} {sizes}" + (f" ({', '.join(notes)})" if notes else "")


def collectives(hlo: str) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text, reached from its entry.

    hlo: `jitted.lower(...).compile().as_text()`. Collectives of one replica exchange nothing and are left
    out.
    """
    computations, entry = _computations(hlo)
    return [c for c in _walk(computations, entry, 1, False, False) if c.num_replicas > 1]


def bytes_per_step(found: Iterable[Collective]) -> int:
    """Bytes that one replica sends per call, branches included."""
    return sum(c.sent_bytes * c.times for c in found)


def state_bytes(state: Any) -> dict[str, int]:
    """Bytes of a TrainState's parts on one device; "host": the part in host memory, if any."""
    found = {name: 0 for name in (*state._fields, "host")}
    for name, part in state._asdict().items():
        for leaf in jax.tree.leaves(part):
            kept = "host" if leaf.sharding.memory_kind == HOST_MEMORY else name
            found[kept] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return found if found["host"] else {name: found[name] for name in state._fields}


def memory_bytes(compiled: Any) -> dict[str, int]:
    """Bytes on one device while the program runs: arguments, results not in donated arguments, the rest."""
    found = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }


def plan_lines(found: list[Collective], state: Mapping[str, int], memory: Mapping[str, int]) -> list[str]:
    """The plan as text: what an optimizer step sends and holds."""
    sent = [c.line() for c in found] or ["nothing: there is one replica"]
    held = {
        "parameters": state["params"],
        "optimizer and strategy": state["sync"],
        "model state": state["model_state"],
        "gradients and activations": memory["temporaries"],
    }
    waits = f"waiting in the host's memory{scaled(state.get('host', 0), 'B'):>9}, a part for each device"
    return [
        f"sent in an optimizer step, {scaled(bytes_per_step(found), 'B')} per replica:",
        *(f"  {line}" for line in sent),
        "held on each device:",
        *(f"  {name:25} {scaled(count, 'B'):>9}" for name, count in held.items()),
        *([waits] if state.get("host") else []),
    ]


class _Computation(NamedTuple):
    own: list[Collective]
    calls: list[tuple[str, int, bool, bool]]  # (computation, times, in a loop, in a branch)


def _computations(hlo: str) -> tuple[dict[str, _Computation], str]:
    found: dict[str, _Computation] = {}
    entry, current = "", _Computation([], [])
    everyone = math.prod(int(n) for n in _EVERYONE.findall(hlo.split("\n", 1)[0]))
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            current = found[head[2]] = _Computation([], [])
            entry = head[2] if head[1] else entry
        elif collective := _collective(line, everyone):
            current.own.append(collective)
        else:
            current.calls.extend(_calls(line))
    return found, entry


def _calls(line: str) -> Iterator[tuple[str, int, bool, bool]]:
    trips = _TRIPS.search(line)
    in_loop = " while(" in line
    for name in _CALLED.findall(line):
        yield name, int(trips[1]) if trips else 1, in_loop, False
    for listed, single in _BRANCHES.findall(line):
        for name in re.findall(r"[\w.\-]+", listed) or [single]:
            yield name, 1, False, True


def _walk(
    computations: dict[str, _Computation], name: str, times: int, in_loop: bool, in_branch: bool
) -> Iterator[Collective]:
    here = computations.get(name, _Computation([], []))
    for c in here.own:
        yield replace(c, times=times, in_loop=in_loop, in_branch=in_branch)
    for called, count, loop, branch in here.calls:
        yield from _walk(computations, called, times * count, in_loop or loop, in_branch or branch)


def _collective(line: str, everyone: int) -> Collective | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    shapes = [_array_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(found[1])]
    if found[3] and found[2] != "all-reduce":
        shapes = shapes[len(shapes) // 2 :]  # an asynchronous start also returns its operands
    groups = _GROUPS.search(line)
    # No groups: all replicas. In the short form [g,n]<=[...] a group has n members.
    members = (len(groups[1].split(",")) if groups[1] else int(groups[2])) if groups else everyone
    whole = sum(shapes) * (members if found[2] == "reduce-scatter" else 1)
    # A tuple has one entry per array, but in an all-to-all one entry per replica.
    arrays = max(1, len(shapes) // members) if found[2] == "all-to-all" else len(shapes)
    return Collective(found[2], whole, members, num_arrays=arrays)


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(found[0]) if (found := _BITS.search(dtype)) else 0
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8
