"""Copies a run folder to an object store during training, and fetches it at the start of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cyxjax.checkpoint.mirror import Mirror
from cyxjax.distributed.agreement import on_any_rank
from cyxjax.distributed.process_group import ProcessGroup
from cyxjax.launch.heartbeat import report_progress
from cyxjax.observe.sinks import warn_on_stderr
from cyxjax.run_folder import RunFolder


def fetch(url: str | None, folder: RunFolder, group: ProcessGroup, *, resumes: bool) -> None:
    """Brings the newest good step of the mirror at `url`, if it is newer than those here, for all ranks to
    see.

    Raises: ConfigError for a mirror that cannot be used; CheckpointError for one that cannot be read where
        nothing is here to go on from.
    """
    if url is None:
        return
    if group.topology.is_master:
        mirror = Mirror(url, folder, warn_on_stderr)
        report_progress(-1, "checkpoint")
        if resumes:
            mirror.fetch()
    on_any_rank(group, "the mirror")


@contextmanager
def mirrored(
    url: str | None, folder: RunFolder, *, is_master: bool, stopped: Callable[[], bool]
) -> Iterator[None]:
    """Copies the run folder in the background while the block runs, and what is left at its end.

    stopped: whether a signal ended the run; then, as after an error, the end waits less.
    """
    if url is None or not is_master:
        yield
        return
    mirror, is_whole = Mirror(url, folder, warn_on_stderr), False
    mirror.start()
    try:
        yield
        is_whole = not stopped()
    finally:
        mirror.end(not is_whole, lambda: report_progress(-1, "checkpoint"))
