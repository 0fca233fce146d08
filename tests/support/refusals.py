"""Checks that an error names its key, in one line with a hint."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cyxjax.errors import ConfigError, CyxjaxError


@contextmanager
def refused(key: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Checks that the block raises a ConfigError about `key`. match: a pattern for its text."""
    with pytest.raises(ConfigError, match=match) as caught:
        yield caught
    assert caught.value.key == key


@contextmanager
def refused_in_a_line(
    kind: type[CyxjaxError] = ConfigError, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[CyxjaxError]]:
    """Checks that the block raises an error of this kind, in one line with a hint."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    text = str(caught.value)
    assert "HINT: " in text
    assert "\n" not in text
