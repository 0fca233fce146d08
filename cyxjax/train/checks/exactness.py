"""What `reproducibility: exact` needs of the machine and the data."""

from collections.abc import Mapping
from typing import Any

import jax

from cyxjax.data.content import drawn_anew, read_otherwise
from cyxjax.data.sources import Dataset
from cyxjax.errors import ConfigError
from cyxjax.train.feeding.fit_data import FitData, is_loader
from cyxjax.train.settings import Exactness


def check_numbered(config: Mapping[str, Any], data: FitData) -> None:
    """An exact run reads samples by number. Raises: ConfigError where it cannot.

    config: resolved, with a loader's batch size in place of the global one.
    """
    if config["reproducibility"] != "exact":
        return
    if not data.indexed or config.get("global_batch_size") is None or is_loader(data.val):
        raise ConfigError(
            "reproducibility='exact' reads samples by number, and the data come from a loader, whose batches "
            "depend on the processes. HINT: pass arrays or the dataset itself, and set global_batch_size."
        )


def check_repeats(exactness: Exactness, content: Mapping[str, Any]) -> None:
    """An exact run's samples are what their number says, whenever and by whom they are read.

    content: by the name of the data, as `content_of` gives it. Raises: ConfigError with a sample that is not.
    """
    for name, found in content.items():
        if exactness.mode == "exact" and (samples := drawn_anew(found)):
            raise ConfigError(
                f"sample {samples[0]} of the {name} was read twice and differed: its augmentation depends "
                "on what was read before, which reproducibility='exact' cannot repeat. HINT: draw with "
                "a generator made from the sample's index, np.random.default_rng((seed, index))."
            )


def check_apart(exactness: Exactness, data: Mapping[str, Dataset]) -> None:
    """Nor does what a sample is hang on those that are read with it: each process reads its own share.

    data: by name. Raises: ConfigError with a sample of which it does.
    """
    for name, dataset in data.items():
        if exactness.mode == "exact" and (sample := read_otherwise(dataset)) is not None:
            raise ConfigError(
                f"sample {sample} of the {name} is another one when it is read together with others, which "
                "reproducibility='exact' cannot have: each process reads its own share. HINT: let take make "
                "a row of its index alone, and pad all samples to one length."
            )


def check_flags(exactness: Exactness, env: Mapping[str, str]) -> None:
    """An exact run's sums have one order; a compiler that may choose it looks at what is compiled with them.

    Measured (jaxlib 0.10.2): with fast math an MLP has other bits on one device than on three.
    Raises: ConfigError where the flags of XLA in `env` allow it.
    """
    if exactness.mode == "exact" and lets_reorder(env.get("XLA_FLAGS", "")):
        raise ConfigError(
            "XLA_FLAGS has --xla_cpu_enable_fast_math, which lets the compiler choose the order of sums: "
            "reproducibility='exact' would hang on the devices. HINT: take it out of XLA_FLAGS."
        )


def lets_reorder(flags: str) -> bool:
    """Whether the last word on fast math in `flags` (XLA_FLAGS) is yes."""
    said = [flag.partition("=") for flag in flags.split()]
    values = [value for name, _, value in said if name.lstrip("-") == "xla_cpu_enable_fast_math"]
    return bool(values) and values[-1].lower() not in ("false", "0")


def check_threads(exactness: Exactness, threads: int) -> None:
    """An exact run has its own number of CPU threads; `threads`: of this process's pool, 0 if not known.

    Raises: ConfigError where they differ.
    """
    wanted = exactness.threads
    if jax.default_backend() == "cpu" and wanted is not None and threads != wanted:
        raise ConfigError(
            f"this process computes with {threads} CPU threads, reproducibility='exact' with {wanted} "
            f"(exact_threads, or virtual_replicas): other threads, other bits. HINT: call "
            f"cx.distributed.init(threads={wanted}) first, or set exact_threads."
        )
