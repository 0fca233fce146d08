"""Fixtures for tests with several processes: forked ranks, which need not import everything again."""

import multiprocessing
from pathlib import Path

import pytest

from tests.support import forked


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers keep their files in `tmp_path`, where a failed job without --log-dir leaves its record."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def forked_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cyxjax.distributed.spawn` forks its ranks."""
    forks = forked.server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
