"""What `reproducibility: exact` needs of the machine and the data."""

from collections.abc import Mapping
from typing import Any

import jax

from cyxjax.data.content import drawn_anew, read_otherwise
from cyxjax.data.sources import Dataset
from cyxjax.errors import ConfigError
from cyxjax.train.feeding.fit_data import FitData, is_loader


def check_numbered(config: Mapping[str, Any], data: FitData) -> None:
    """Checks that an exact run can read its samples by number. Raises: ConfigError where it cannot.

    config: resolved, with a loader's batch size in place of the global one.
    """
    if not data.indexed or config.get("global_batch_size") is None or is_loader(data.val):
        raise ConfigError(
            "reproducibility='exact' reads samples by number, and the data come from a loader, whose batches "
            "depend on the processes. HINT: pass arrays or the dataset itself, and set global_batch_size."
        )


def check_reads(data: Mapping[str, Dataset], content: Mapping[str, Any]) -> None:
    """An exact run's samples are what their number says, whenever, by whom and beside which others they are
    read: each process reads its own share.

    content: by the name of the data, as `content_of` gives it. Raises: ConfigError with a sample that is not.
    """
    for name, dataset in data.items():
        if (sample := read_otherwise(dataset)) is not None:
            raise ConfigError(
                f"sample {sample} of the {name} differs when it is read together with others, which "
                "reproducibility='exact' does not allow: each process reads its own share. HINT: make each "
                "row in `take` from its index alone, and pad all samples to one length."
            )
        if samples := drawn_anew(content[name]):
            raise ConfigError(
                f"sample {samples[0]} of the {name} was read twice and differed: its augmentation depends "
                "on what was read before, which reproducibility='exact' cannot repeat. HINT: draw with "
                "a generator made from the sample's index, np.random.default_rng((seed, index))."
            )


def check_machine(wanted: int | None, threads: int, env: Mapping[str, str]) -> None:
    """An exact run has its own number of CPU threads, and one order of its sums.

    A compiler that may choose the order looks at what is compiled with them. Measured (jaxlib 0.10.2): with
    fast math an MLP has other bits on one device than on three.
    wanted: None for any number of threads. threads: of this process's pool, 0 if not known.
    Raises: ConfigError where the threads differ, or the flags of XLA in `env` allow another order.
    """
    if jax.default_backend() == "cpu" and wanted is not None and threads != wanted:
        raise ConfigError(
            f"this process computes with {threads} CPU threads, reproducibility='exact' with {wanted} "
            f"(exact_threads, or virtual_replicas): another number of threads changes the bits. HINT: call "
            f"cx.distributed.init(threads={wanted}) first, or set exact_threads."
        )
    if lets_reorder(env.get("XLA_FLAGS", "")):
        raise ConfigError(
            "XLA_FLAGS has --xla_cpu_enable_fast_math, which lets the compiler choose the order of sums: "
            "the bits of reproducibility='exact' would depend on the devices. HINT: take it out of XLA_FLAGS."
        )


def lets_reorder(flags: str) -> bool:
    """Whether `flags` (XLA_FLAGS) enable fast math; the last value counts."""
    given = [flag.partition("=") for flag in flags.split()]
    values = [value for name, _, value in given if name.lstrip("-") == "xla_cpu_enable_fast_math"]
    return bool(values) and values[-1].lower() not in ("false", "0")
