"""Memory pages of training on CPUs: huge ones, and kept ones, which a step frees and the next one uses again.

XLA frees the buffers of a step, and glibc returns their pages to the kernel, which clears as many for the
next step: up to a third of the time of a step with large temporaries. Two settings of glibc prevent that:
  huge  malloc asks the kernel for pages of 2 MB. Read when a process starts: only a launcher can set it.
  kept  freed pages stay in the process, whose peak of memory grows by up to two fifths.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from cyxjax.errors import ConfigError
from cyxjax.files import text_in
from cyxjax.launch.environment import visible_gpus

VARIABLE = "CYXJAX_PAGES"
AUTO, OFF = "auto", "off"
DEFAULT = "huge+kept"  # of `auto`, on CPUs with enough memory
WORDS = (AUTO, OFF, "huge", "kept", "huge+kept")
ENOUGH_BYTES = 2 * 10**9  # of memory that is available to each process
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLE = "glibc.malloc.hugetlb"
_KEPT = {  # glibc's variable -> (number of mallopt, value, the usual value)
    "MALLOC_ARENA_MAX": (-8, 1, 0),
    "MALLOC_MMAP_THRESHOLD_": (-3, 1 << 30, 128 << 10),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1, 128 << 10),
}
_PR_SET_THP_DISABLE = 41


def chosen(env: Mapping[str, str], processes_here: int, asked: str = AUTO) -> str:
    """One of WORDS but `auto`: `asked`, else CYXJAX_PAGES, else DEFAULT where it suits.

    processes_here: processes of the job on this host, which share its memory. Raises: ConfigError.
    """
    word = asked if asked != AUTO else env.get(VARIABLE) or AUTO
    if word not in WORDS:
        raise ConfigError(
            f"{VARIABLE}={word!r}; expected one of {', '.join(WORDS)}. HINT: use {OFF} or {AUTO}."
        )
    if word != AUTO:
        return word
    is_cpu = env.get("JAX_PLATFORMS") == "cpu" or env.get("DISTRIBUTED_BACKEND") in ("cpu", "gloo")
    suits = sys.platform == "linux" and (is_cpu or not visible_gpus(env))
    return DEFAULT if suits and available_bytes() >= ENOUGH_BYTES * max(1, processes_here) else OFF


def variables(env: Mapping[str, str], processes_here: int) -> dict[str, str]:
    """What a launcher adds to the environment of its processes; the user's own values are kept."""
    word, tunables, added = chosen(env, processes_here), env.get("GLIBC_TUNABLES", ""), {}
    if "huge" in word and _TUNABLE not in tunables:
        added["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, f"{_TUNABLE}=1"]))
    if "kept" in word:
        added |= {name: str(value) for name, (_, value, _) in _KEPT.items() if name not in env}
    return added


def use(asked: str = AUTO, processes_here: int = 1, env: Mapping[str, str] = os.environ) -> None:
    """Sets in this process what can be set after its start; `off` undoes what a launcher has set."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    kept = "kept" in chosen(env, processes_here, asked)
    for name, (number, value, usual) in _KEPT.items():
        if name not in env if kept else asked != AUTO:
            mallopt(number, value if kept else usual)
    if asked == OFF:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def described(env: Mapping[str, str], processes_here: int) -> str:
    """One line for people: what processes of the launcher get here, and why."""
    word, share = chosen(env, processes_here), available_bytes() / max(1, processes_here)
    return f"{word} ({VARIABLE}={env.get(VARIABLE) or AUTO}; {share / 1e9:.1f} GB available per process)"


def refused_by_kernel(env: Mapping[str, str], kernel: Path = KERNEL) -> str:
    """What to do where huge pages are wanted and the kernel gives none; "" where it gives them."""
    if "huge" not in chosen(env, 1) or "[never]" not in text_in(kernel):
        return ""
    return (
        f"huge pages are off in the kernel. HINT: as root, echo madvise > {kernel}, or set {VARIABLE}=kept."
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that new processes may take: of the host, or of the control group around this process."""
    group = root / "sys/fs/cgroup"
    host, own = (
        dict(line.split()[:2] for line in text_in(path).splitlines())
        for path in (root / "proc/meminfo", group / "memory.stat")
    )
    limit, used = (text_in(group / name).strip() for name in ("memory.max", "memory.current"))
    available, cache = int(host.get("MemAvailable:", 0)) * 1024, int(own.get("inactive_file", 0))
    # Used memory includes the cache of files that were read, which the kernel frees when it is needed.
    is_limited = limit.isdecimal() and used.isdecimal()
    return min(available, int(limit) - int(used) + cache) if is_limited else available
