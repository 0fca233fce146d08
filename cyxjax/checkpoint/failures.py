"""A save that failed, in one line."""

import errno
import shutil
from pathlib import Path

from cyxjax.checkpoint.store import Snapshot

_FULL_TEXTS = ("RESOURCE_EXHAUSTED", "No space left on device", "Disk quota exceeded")


def describe_failure(snapshot: Snapshot, error: BaseException, directory: Path, in_a_row: int) -> str:
    """One line for a failed save whose own files are gone; a full disk is told with the bytes missing."""
    what = f"{type(error).__name__}: {str(error)[:300]}"
    if is_disk_full(error):
        need_bytes = snapshot.num_bytes
        free_bytes = shutil.disk_usage(directory).free
        missing_mb = max(need_bytes - free_bytes, 0) / 1e6
        what = (
            f"the disk is full: {need_bytes / 1e6:.1f} MB needed, {free_bytes / 1e6:.1f} MB free, "
            f"{missing_mb:.1f} MB missing"
        )
    return (
        f"Checkpoint step {snapshot.step} was not saved in {directory} ({in_a_row} in a row): {what}. "
        "Training goes on; earlier steps are untouched. HINT: check the disk."
    )


def is_disk_full(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, says that the disk or the quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(text in str(error) for text in _FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
