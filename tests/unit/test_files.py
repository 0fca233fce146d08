"""Files written whole, appended to and locked: `cyxjax.files`, the one copy."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest

from cyxjax import files
from cyxjax.files import (
    append,
    read_json_lines,
    read_plain,
    sync,
    try_flock,
    write_whole,
)


def test_a_file_is_replaced_whole_or_not_and_nothing_stays_beside_it(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", "old")
    write_whole(tmp_path / "a", b"new")
    monkeypatch.setattr(files.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"\[Errno 28\]"):
        write_whole(tmp_path / "a", "newer")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_file_and_folder_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    done, replace = [], os.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: done.append(stat.S_ISDIR(os.fstat(fd).st_mode)))
    monkeypatch.setattr(files.os, "replace", lambda *paths: done.append("renamed") or replace(*paths))
    write_whole(tmp_path / "a", "x")
    assert done == [False, "renamed", True]


SPECIAL = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "device": partial(os.symlink, "/dev/zero"),  # replacing the link would be as bad as reading endlessly
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_plain_file_is_neither_read_nor_replaced(tmp_path, kind):
    path = tmp_path / "special"
    SPECIAL[kind](path)
    for use in (read_plain, lambda p: write_whole(p, "x"), lambda p: append(p, b"x")):
        with pytest.raises(OSError, match="special'"):
            use(path)
    assert not path.is_file()


def test_a_plain_file_is_read_up_to_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    assert read_plain(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match=r"4 bytes.*/a'"):
        read_plain(tmp_path / "a", 4)


def test_an_append_is_all_or_nothing(tmp_path):
    code = (
        "import resource, signal, sys\nfrom cyxjax.files import append\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "append(sys.argv[1], b'1234567\\n')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12, 12))\n"
        "try:\n    append(sys.argv[1], b'abcdefg\\n')\nexcept OSError as error:\n    print(error.errno)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "27\n"  # EFBIG, after 4 of the 8 bytes
    assert (tmp_path / "a").read_bytes() == b"1234567\n"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=r"\[Errno 40\].*/link'"):
        append(tmp_path / "link", b"x")
    assert (tmp_path / "a").read_bytes() == b"1234567\n"


def test_a_line_appended_after_one_that_a_power_cut_tore_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b'{"step": 1}\n{"st')
    append(tmp_path / "a", b'{"step": 2}\n')
    append(tmp_path / "a", b'{"step": 3}\n')
    assert [line["step"] for line in read_json_lines(tmp_path / "a")] == [1, 2, 3]


def test_a_lock_is_seen_by_others_until_it_is_closed(tmp_path):
    (tmp_path / "a").touch()
    first, second = (os.open(tmp_path / "a", os.O_RDWR) for _ in range(2))
    assert try_flock(first)
    assert not try_flock(second)
    assert not try_flock(second, shared=True)
    os.close(first)
    assert try_flock(second, shared=True)
    os.close(second)


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_what_is_printed_without_streams_goes_into_no_file(tmp_path, closed):
    code = (
        "import os, sys\nfrom cyxjax.command import prepare_streams\nprepare_streams()\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\nassert fd > 2, fd\n"
        "print('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\n"
        "assert not sys.stdout.isatty()\n"
    )
    closing = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    command = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closing}', sys.executable, code, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == ""
    assert done.stdout == ("" if 1 in closed else "out\n")


@pytest.mark.parametrize(
    ("number", "passed"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)]
)
def test_a_folder_that_cannot_be_synced_is_passed_over_where_there_is_no_such_call(
    tmp_path, monkeypatch, number, passed
):
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(number, "no")))
    with contextlib.nullcontext() if passed else pytest.raises(OSError, match="no"):
        sync(tmp_path)
