"""The table of errors of other libraries and of the system: their translation, and errors left unchanged."""

import errno
import os

import pytest

from cyxjax.errors import ConfigError, known, translated


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "-u"),
        (RuntimeError("can't start new thread"), "-u"),
        (MemoryError(), "ulimit -v"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), "cd"),
        (
            RuntimeError(
                "Unable to initialize backend 'xyz': Backend 'xyz' is not in the list of known backends: "
                "['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose an available backend)"
            ),
            "'xyz'",
        ),
    ],
)
def test_a_known_error_is_raised_as_ours(error, names):
    with pytest.raises(ConfigError, match=names) as caught, translated():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "data.npz"), "'data.npz'"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.npz"), "'out.npz'"),
        (OSError("cannot seek"), "cannot seek"),
        (OverflowError("int too large to convert"), "too large"),
    ],
)
def test_a_command_has_a_line_for_every_error_of_the_system(error, names):
    found = known(error, system=True)
    assert isinstance(found, ConfigError)
    assert names in str(found)
    assert "[Errno" not in str(found)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "data.npz"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("can't start new thread pools"),
        ValueError("[Errno 24] Too many open files"),
    ],
)
def test_any_other_error_stays_as_it_is(error):
    assert known(error) is None
    with pytest.raises(type(error)) as caught, translated():
        raise error
    assert caught.value is error
