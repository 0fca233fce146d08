"""What tests of several processes share: ranks that need not import everything anew."""

import multiprocessing

import pytest

from tests.support import forked


@pytest.fixture
def forked_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cyxjax.distributed.spawn` forks its ranks."""
    forks = forked.server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
