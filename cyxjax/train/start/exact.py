"""What the bits of an exact run hang on, as digests: kept in its checkpoints, compared when it goes on.

The text of the compiled programs alone does not say it all (another number of threads left it equal, and the
bits not), so there is a canary: the digest of what the part's program really gives on the first samples, with
the parameters the seed draws. A difference is found in the process that has it.
"""

import hashlib
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jaxlib
import numpy as np

from cyxjax.core.exact.calls import Part, Parts
from cyxjax.core.exact.step import PartsStep, by_device
from cyxjax.core.exact.tree_sum import widened
from cyxjax.data.batches import HostBatch
from cyxjax.data.sources import Dataset
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError
from cyxjax.observe.state_digests import contradicted_leaves
from cyxjax.train.feeding.keying import Keying, unkeyed
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.run_state import first_state
from cyxjax.train.settings import Settings

_DIGITS = 16


def fingerprint(plan: Plan, program: Program) -> dict[str, str]:
    """name -> digest or words, of the programs compiled here for `plan`; {} unless it is exact."""
    step, data = program.train_step, plan.data
    if not isinstance(step, PartsStep) or data is None:
        return {}
    device, rows = step.layout.devices[0], plan.settings.step.batch.batch_size
    state = first_state(plan, program)[0].state
    here, total = by_device(state, [device])[0], np.float32(rows)
    parts = first_part(data.train, rows, data.keying)
    way = step.part.way(here, parts, total)
    made = way([here], [parts], total)[0].of(range(1))[0]
    # As if all the parts came to what the first one does; the state is given away.
    update = (here, jax.tree.map(widened, made), total, np.zeros(2, np.float32))
    lowered = {"program": way.lower(here, parts, total), "update": step.writes[0].lower(*update)}
    moved = step.writes[0](*update)
    return {
        "parts": f"{step.layout.num_parts} of {rows} samples, {way.name}",
        **{name: _digest(without_places(one.compile().as_text()).encode()) for name, one in lowered.items()},
        "machine": machine(device, plan.group.threads),
        "canary": _digest(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((made, moved)))),
    }


def first_part(data: Dataset, rows: int, keying: Keying = unkeyed) -> Parts:
    """Part 0 alone, with the first samples of `data`, again from the start if they are fewer."""
    weight, places = np.ones(rows, np.float32), np.arange(rows)
    host = keying(HostBatch(*data.take(places % len(data)), weight, rows, places), 0, places)
    part = Part(np.int32(0), *host[:3])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], part)


def machine(device: jax.Device, threads: int) -> str:
    """Device, versions and threads: what makes code and order of additions of a program."""
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    if device.platform != "cpu":
        return f"{device.device_kind}, {versions}"
    return f"{platform.machine()} {_instructions()}, {versions}, {threads} threads"


def _instructions() -> str:
    """Digest of the CPU's instruction sets; its name where the system does not list them."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return _digest(" ".join(sorted(found[1].split())).encode()) if found else platform.processor()


def without_places(text: str) -> str:
    """Optimized HLO without where in the source it came from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text.split("\n\nFileNames")[0])
    return re.sub(r"(, )?(stack_frame_id=\d+|xla\.sdy\.meshes=\{[^}]*\})", "", text)


def differences(stored: dict[str, str], now: dict[str, str]) -> list[str]:
    """One text for each thing that is not as it was."""
    return [
        f"{name} was {stored[name]}, is {now[name]}"
        for name in now
        if name in stored and stored[name] != now[name]
    ]


def judge(found: list[str], policy: Literal["refuse", "warn"], warn: Callable[[str], None]) -> None:
    """Lets an exact run go on where `found`, what changed since its checkpoint, is empty or accepted.

    Raises: CheckpointError if not.
    """
    if not found:
        return
    text = f"this exact run would go on with other bits: {'; '.join(found)}."
    if policy == "refuse":
        raise CheckpointError(
            f"{text} HINT: resume with the same settings on the same kind of machine and versions, or accept "
            "it with exact=warn."
        )
    warn(f"WARNING: {text}")


def judge_step(
    directory: Path, step: int, settings: Settings, group: ProcessGroup, warn: Callable[[str], None]
) -> None:
    """Compares the stored `step` of an exact run with the digests that the run recorded; all ranks call it.

    Rank 0 reads, for it wrote both. Raises: CheckpointError on every rank if the step has other bits.
    """
    if settings.exactness.mode == "none" or settings.run_folder is None:
        return
    bits = settings.run_folder.bits
    found = contradicted_leaves(directory, step, bits) if group.topology.is_master else []
    found = agree(group, "comparing the checkpoint with its digests", note=found)[0]
    if not found:
        return
    text = (
        f"checkpoint step {step} in {directory} is not the state that this run recorded in {bits.name}: "
        f"{len(found)} leaves have other digests, the first is {found[0]}."
    )
    if settings.exactness.on_other_bits == "refuse":
        raise CheckpointError(f"{text} HINT: move that step elsewhere to resume from an older one.")
    if group.topology.is_master:
        warn(f"WARNING: {text}")


def changed_mode(meta: dict[str, Any], mode: str) -> list[str]:
    """A line where a run goes on from a checkpoint of another mode; meta: what that says of itself."""
    then = meta.get("config", {}).get("reproducibility", "none")  # version 0.1.0 had the plain mode alone
    if then == mode:
        return []
    what, hint = _OTHER_MODE[mode]
    step = meta.get("position", {}).get("step", "?")
    return [f"WARNING: the checkpoint of step {step} has reproducibility={then}: {what}. HINT: {hint}."]


_OTHER_MODE = {
    "exact": (
        "this run is exact from there on, but the bits it begins with depend on how many replicas made them",
        "for bits that do not, begin a new run folder with reproducibility=exact",
    ),
    "none": (
        "this run is plain, and its bits depend on the number of replicas from there on",
        "resume with reproducibility=exact to keep the promise",
    ),
}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
