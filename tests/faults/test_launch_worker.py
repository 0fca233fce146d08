"""A rank that ends at the very moment a signal is sent to it is still seen to end."""

import threading

import pytest

from cyxjax.launch.supervise.worker import Files, Worker

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("number", range(20))
def test_an_end_is_noticed_while_signals_are_sent(tmp_path, number):
    files = Files.within(str(tmp_path), 0, 0)
    worker = Worker(
        0, ["true"], {"PATH": "/usr/bin:/bin"}, files, prefix="", shown=False, log_dir=None, start=0
    )
    ended = threading.Event()
    worker.watch(lambda _: ended.set())
    while worker.returncode is None and not ended.wait(0.0):
        worker.signal(0)  # asks whether the process is there, as every signal does, and does it no harm
    assert ended.wait(60)
    assert worker.returncode == 0
    worker.close()
