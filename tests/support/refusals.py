"""Errors that name the key they are about."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cyxjax.errors import ConfigError


@contextmanager
def refused(key: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """The block raises a ConfigError about `key`; match: of its text."""
    with pytest.raises(ConfigError, match=match) as caught:
        yield caught
    assert caught.value.key == key
