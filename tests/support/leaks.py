"""Checks that a test leaves nothing behind. They run before and after every test, so each is cheap."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import psutil

# Texts of what may stay, and the reason.
HARMLESS = {
    "environment": {
        "PYTEST_CURRENT_TEST": "pytest names the test there",
        "KMP_DUPLICATE_LIB_OK": "scikit-learn sets it once, when it is imported",
        "KMP_INIT_AT_FORK": "scikit-learn sets it once, when it is imported",
        "TF_CPP_MIN_LOG_LEVEL": "jax sets it for a while when its backend starts",
        "CRC32C_SW_MODE": "tensorboardX sets it once, when it is imported",
        "WANDB_SERVICE": "wandb's service, which serves all runs of a process",
        "MLFLOW_ALLOW_FILE_STORE": "mlflow looks for it at each call of its store of files",
    },
    "threads": {
        "asyncio_": "orbax's event loop keeps its pool of workers for the next save",
    },
    "children": {
        "multiprocessing.resource_tracker": "Python's own; ends with this process",
        "multiprocessing.forkserver": "Python's own, for forked.py; ends with this process",
        "wandb-core": "wandb's service; ends with this process",
    },
    "files": {
        ".coverage": "pytest-cov, at the end of each process",
        ".hypothesis": "the examples that hypothesis found",
        ".mypy_cache": "mypy, which a test of the house starts",
        ".pytest_cache": "pytest, at its end",
        ".ruff_cache": "ruff, which a test of the house starts",
    },
}
GRACE_S = 10  # for what is already ending: a thread that was asked to stop, a child that was killed


Traces = dict[str, frozenset[str]]  # by kind: what a test can change and the next one would see, as text


def traces() -> Traces:
    """The current state, without what is `HARMLESS`."""
    return {
        "environment": _kept("environment", (f"{name}={value}" for name, value in os.environ.items())),
        "threads": _kept("threads", (_words(t) for t in threading.enumerate() if not t.daemon)),
        "children": _kept("children", _children()),
        "files": _kept("files", (entry.name for entry in os.scandir("."))) | {str(Path.cwd())},
        "group": _group(),
    }


def left_since(before: Traces, grace_s: float = GRACE_S) -> list[str]:
    """One line per kind of state that has changed; threads and children have `grace_s` to end."""
    end = time.monotonic() + grace_s
    while True:
        after = traces()
        ending = [kind for kind in ("threads", "children") if after[kind] - before[kind]]
        if not ending or time.monotonic() > end:
            return [line for kind in before if (line := _change(kind, before, after))]
        gc.collect()  # a caught exception may hold, in a cycle, a pool of threads that a frame had
        time.sleep(0.02)


def _change(kind: str, before: Traces, after: Traces) -> str:
    more, less = after[kind] - before[kind], before[kind] - after[kind]
    if kind in ("threads", "children"):
        less = frozenset()  # one that began before the test may end during it
    if kind == "environment":  # only names: a value may be a secret
        more, less = ({text.partition("=")[0] for text in texts} for texts in (more, less))
    words = [f"left {text}" for text in sorted(more)] + [f"took away {text}" for text in sorted(less)]
    return f"{kind}: {', '.join(words)}" if words else ""


def _kept(kind: str, texts) -> frozenset[str]:
    return frozenset(text for text in texts if not any(name in text for name in HARMLESS[kind]))


def _words(thread: threading.Thread) -> str:
    return f"{thread.name} ({thread.ident})"


def _children() -> list[str]:
    """Command lines of our child processes, zombies included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case: costs one system call
        return []
    found = []
    for pid in _pids_of_children():
        try:
            words = " ".join(psutil.Process(pid).cmdline()) or "ended, but not waited for"
            found.append(f"{pid} {words}")
        except psutil.Error:  # it has just ended
            continue
    return found


def _pids_of_children() -> list[int]:
    """Pids from Linux's own lists: psutil reads all processes of the machine, at ten times the cost."""
    try:
        pids = [int(pid) for task in os.listdir("/proc/self/task") for pid in _children_of(task)]
    except OSError:  # another system, or a thread that has just ended
        pids = []
    return pids or [child.pid for child in psutil.Process().children()]


def _children_of(task: str) -> list[bytes]:
    with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as file:
        return file.read().split()


def _group() -> frozenset[str]:
    process_group = sys.modules.get("cyxjax.distributed.process_group")
    group = process_group and process_group._current
    return frozenset() if group is None else frozenset({f"a process group of {group.topology.source}"})
