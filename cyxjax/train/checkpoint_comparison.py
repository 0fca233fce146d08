"""Compares the `Facts` of a run with those of the checkpoint that it resumes from.

What changed is a warning where the state still goes with the run; of an exact run it is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import list_steps, step_folder
from cyxjax.checkpoint.manifest import read_manifest
from cyxjax.config.compared import differing_values, effect_of
from cyxjax.config.effects import ARRAYS
from cyxjax.data.content import find_difference
from cyxjax.distributed.agreement import agree
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.errors import CheckpointError, ConfigError, CyxjaxError, OtherStateError
from cyxjax.launch.program import code_facts, own_modules
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.observe.state_digests import contradicted_leaves
from cyxjax.train.fingerprints import Facts
from cyxjax.train.settings import Exactness, Settings

META = "same_run"  # of a checkpoint: digests of its data and code
_NAMED, _SHOWN = 6, 3  # keys, and arrays, of a state that does not go with a run
_HINT = (
    "HINT: set it as it was; or start over with its parameters: init_from: {folder}, with another folder for "
    "this run's checkpoints."
)


def compare_with_checkpoint(
    meta: Mapping[str, Any], facts: Facts, settings: Settings, *, is_master: bool
) -> None:
    """Prints a line, on the master, for all that changed since the checkpoint whose meta data are `meta`.

    Raises: ConfigError for epochs of another length; CheckpointError for an exact run that would go on with
        other bits.
    """
    config = meta.get("config", {})
    _refuse_other_epochs(config, facts.config)
    if is_master:
        lines = [*_changed_mode(meta, settings.step.reproducibility), *changed_keys(config, facts.config)]
        for line in [*lines, *changes(meta, facts.data)]:
            warn_on_stderr(line)  # not to the console: it may be switched off
    stored = meta.get("exact", {})
    samples = _other_samples(meta, facts.data) if stored and facts.exact else []
    judge(differences(stored, facts.exact) + samples, settings.exactness, warn_on_stderr)


def _refuse_other_epochs(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that an epoch has as many steps of the stream as before: positions are counted in them.

    Raises: ConfigError where a run would go on with epochs of another length.
    """
    before, after = then.get("steps_per_epoch"), now.get("steps_per_epoch")
    if then and before != after:
        raise ConfigError(
            f"steps_per_epoch was {before} in the run this one goes on from, and is {after}: its place "
            "in the stream is counted in such epochs. HINT: set it as before, or resume: never.",
            key="steps_per_epoch",
        )


def _changed_mode(meta: Mapping[str, Any], mode: str) -> list[str]:
    """A warning where the checkpoint has another `reproducibility`."""
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


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A warning for each key whose value in `now` differs from that in `then`.

    A key that `then` lacks is of a later version and not compared, unless it is an option, which one gives.
    An empty `then` is of no run that this one goes on from, and nothing is compared.
    """
    if not then:
        return []
    return [
        f"WARNING: the configuration changed since the checkpoint: {key} was {was}, is {now_is}."
        for key, was, now_is in differing_values(then, now, later=True)
        if key != "reproducibility"  # `_changed_mode` has a line of its own
    ]


# ---- data and code of a checkpoint ------------------------------------------------------------------------


def to_meta(facts: Facts) -> dict[str, Any]:
    """`facts` as the meta data of a checkpoint."""
    kept: dict[str, Any] = {"config": facts.config}
    kept[META] = {"code": code_facts(), "data": facts.data, "own": facts.own_code}
    return kept | ({"exact": facts.exact} if facts.exact else {})


def changes(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """Warnings for data and code that changed since `meta` was written."""
    return _read(meta, lambda kept: [*_other_data(kept, data), *_other_code(kept)])


def changed_files(meta: Mapping[str, Any]) -> list[str]:
    """A warning for the user's own files that changed since `meta` was written."""
    return _read(meta, _warning_of_files)


def changed_data(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """A warning for each data set that changed since `meta` was written."""
    hint = "HINT: name the data of then (`data.root`), or train on these."
    return _read(meta, lambda kept: [f"{line} {hint}" for line in _other_data(kept, data)])


def _other_samples(meta: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """A clause for training data that differ in any bit from those `meta` was written with."""
    train = {name: found for name, found in data.items() if name == "training data"}
    return _read(
        meta,
        lambda kept: [
            f"{what} of the {name} was {before}, is {after}"
            for name, what, before, after in _differing(kept, train)
        ],
    )


def _read(meta: Mapping[str, Any], compare: Callable[[Mapping[str, Any]], list[str]]) -> list[str]:
    """What `compare` finds in the meta data; [] where a checkpoint has none, as of earlier versions."""
    if META not in meta:
        return []
    try:
        return compare(meta[META])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ["WARNING: what the checkpoint says of its data and code cannot be read: not compared."]


def _other_data(kept: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    for name, what, before, after in _differing(kept, data):
        yield f"WARNING: the {name} changed since the checkpoint: {what}: {before} then, {after} now."


def _differing(kept: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(name, what differs, then, now) of the data that changed."""
    for name, now in data.items():
        then = kept["data"].get(name)
        if then is not None and (found := find_difference(then, now)):
            yield name, *found


def _other_code(kept: Mapping[str, Any]) -> list[str]:
    now = code_facts()
    other = [name for name, digest in now.items() if kept["code"].get(name, digest) != digest]
    program = now.get("the program", "").split(" ")[0]  # named already
    other += [path for path in _other_files(kept) if Path(path).name != program]
    return [f"WARNING: changed since the checkpoint: {', '.join(other)}."] if other else []


def _other_files(kept: Mapping[str, Any]) -> list[str]:
    then = kept.get("own", {})
    return [path for name, (digest, path) in own_modules().items() if then.get(name, digest) != digest]


def _warning_of_files(kept: Mapping[str, Any]) -> list[str]:
    files = _other_files(kept)
    if not files:
        return []
    return [
        f"WARNING: {', '.join(files)} changed since the checkpoint was written: what is loaded computes as "
        "the code says now. HINT: go back to the code of then, or train again."
    ]


# ---- the bits of an exact run -----------------------------------------------------------------------------


def differences(stored: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A text for each value that differs."""
    return [
        f"{name} was {stored[name]}, is {now[name]}"
        for name in now
        if name in stored and stored[name] != now[name]
    ]


def judge(found: list[str], exactness: Exactness, warn: Callable[[str], None]) -> None:
    """Returns where `found`, what changed since the checkpoint of an exact run, is empty or accepted.

    Raises: CheckpointError if not.
    """
    if not found:
        return
    text = f"this exact run would go on with other bits: {'; '.join(found)}."
    if exactness.on_other_bits == "refuse":
        raise CheckpointError(
            f"{text} HINT: resume with the same settings on the same kind of machine and versions, or accept "
            "it with exact=warn."
        )
    warn(f"WARNING: {text}")


def compare_with_digests(directory: Path, step: int, settings: Settings, group: ProcessGroup) -> None:
    """Compares the stored `step` of an exact run with the digests that the run recorded; all ranks call it.

    Rank 0 reads, for it wrote both. Raises: CheckpointError on every rank if the step has other bits.
    """
    if not settings.step.is_exact or settings.run_folder is None:
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
        warn_on_stderr(f"WARNING: {text}")


# ---- a state that does not go with a run ------------------------------------------------------------------


def refuse_other_strategy(loaded: str, now: str) -> None:
    """Raises: ConfigError where the strategy of a fit differs from that of the loaded state."""
    if loaded != now:
        raise ConfigError(
            f"load_checkpoint gave a state as comm={loaded!r} keeps it, this fit has comm={now!r}. HINT: "
            f"comm={loaded!r}, or fit a new trainer with checkpoint_dir=<that folder>, resume='auto': it "
            "takes a checkpoint under any strategy.",
            key="comm",
        )


@contextmanager
def naming_settings(
    checkpointer: Checkpointer, step: int | None, config: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Iterator[None]:
    """A block whose OtherStateError first names the settings that differ.

    config and inputs: of this run, as its own checkpoints say them. Raises: OtherStateError.
    """
    try:
        yield
    except OtherStateError as error:
        meta = _meta_of(checkpointer, step)
        then, unlike = meta.get("inputs", inputs), error.unlike
        other = _other_settings(meta.get("config", {}), config)
        if then != inputs:
            other.insert(0, f"a sample was {_sample(then)}, is {_sample(inputs)}")
        what = "; ".join(other[:_NAMED]) or "the model or the optimizer is another"
        first = sorted(unlike, key=lambda name: (not name.startswith(("params/", "model_state/")), name))
        shown = "; ".join(f"{name} {unlike[name]}" for name in first[:_SHOWN])
        more = f"; and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
        text = f"the checkpoint is of another run than this: {what} ({shown}{more})."
        raise OtherStateError(f"{text} {_HINT.format(folder=checkpointer.directory)}", unlike) from None


def _meta_of(checkpointer: Checkpointer, step: int | None) -> Mapping[str, Any]:
    """Meta data of a step, or of the newest; {} where they cannot be read."""
    with suppress(CyxjaxError, OSError, ValueError):
        newest = max(list_steps(checkpointer.directory)) if step is None else step
        return read_manifest(step_folder(checkpointer.directory, newest)).meta
    return {}


def _other_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`comm was 'mean', is 'bf16'` for each setting that the arrays depend on; a learning rate is none."""
    other = {key: values for key, *values in differing_values(then, now, later=True)} if then else {}
    if "optimizer.name" in other:  # of another rule all else is another
        rule = ("optimizer.name",)
        other = {key: one for key, one in other.items() if key in rule or not key.startswith("optimizer.")}
    elif "not given" not in other.get("optimizer.lr", ()):
        other.pop("optimizer.lr", None)
    return [
        f"{key} was {was}, is {now_is}" for key, (was, now_is) in other.items() if effect_of(key) in ARRAYS
    ]


def _sample(inputs: Mapping[str, Any]) -> str:
    leaves = [f"{name} {kind}{shape}".strip() for name, (shape, kind) in inputs.items()]
    return ", ".join(leaves) or "nothing"
