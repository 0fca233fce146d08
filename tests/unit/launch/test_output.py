"""Our output streams: a reader that is slow, stops or leaves does not delay the program for long."""

import os
import socket
import threading
import time
from contextlib import nullcontext

import pytest

from cyxjax.launch import output
from cyxjax.launch.group.protocol import MAX_LINE
from cyxjax.launch.output import WAITING_BYTES, Screen, disagreement, ranks_text

LINE = b"x" * 1023 + b"\n"


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        os.close(end)


def read_until(reader: int, last: bytes) -> bytes:
    data = bytearray()
    while last not in data[-200:]:
        data += os.read(reader, 1 << 20)
    return bytes(data)


def test_a_reader_that_stands_still_holds_up_once_and_is_told_what_it_missed(pipe):
    reader, writer = pipe
    screen, number = Screen(writer), 2 * WAITING_BYTES // len(LINE)
    began = time.monotonic()
    for _ in range(number):
        screen.put(LINE, patience_s=0.3)
    assert time.monotonic() - began < 60  # not 0.3 s for each dropped line
    screen.flush(0.1)  # returns although nothing is read
    shown = read_until(reader, b"keeps every line)\n")
    missed = int(shown.rpartition(b"cyxjax.launch: ")[2].split()[0])
    assert 0 < missed == number - shown.count(LINE)
    screen.put(b"again\n")
    assert read_until(reader, b"again\n") == b"again\n"


def test_a_slow_reader_gets_every_line(pipe):
    reader, writer = pipe
    screen, number, got = Screen(writer), 2 * WAITING_BYTES // len(LINE), []
    late = threading.Timer(0.3, lambda: got.append(read_until(reader, b"end\n")))
    late.start()
    for _ in range(number):
        screen.put(LINE, patience_s=60)
    screen.put(b"end\n", patience_s=60)
    late.join()
    assert got[0] == LINE * number + b"end\n"


def test_a_reader_that_has_gone_holds_up_nobody():
    reader, writer = os.pipe()
    os.close(reader)
    screen, began = Screen(writer), time.monotonic()
    for _ in range(2 * WAITING_BYTES // len(LINE)):
        screen.put(LINE, patience_s=60)
    screen.flush(60)
    assert time.monotonic() - began < 60  # no writer used its whole patience
    os.close(writer)


def test_a_pipe_that_does_not_block_loses_nothing(pipe):
    reader, writer = pipe
    os.set_blocking(writer, False)
    data = LINE * 1000 + b"end\n"  # ten times what a pipe holds
    Screen(writer).put(data)
    assert read_until(reader, b"end\n") == data


def test_a_text_larger_than_the_queue_is_shown(pipe):
    reader, writer = pipe
    data = b"x" * WAITING_BYTES + b"end\n"
    Screen(writer).put(data)
    assert read_until(reader, b"\n") == data


def test_a_line_about_very_many_ranks_fits_one_message():
    assert ranks_text([4, 2, 1, 0]) == "ranks 0-2, 4"
    assert len(disagreement("jax", {rank: rank % 900 for rank in range(100_000)})) < MAX_LINE // 4
    assert ranks_text(range(0, 100, 2)) == f"ranks {', '.join(map(str, range(0, 32, 2)))}, ..."


def test_a_file_that_is_closed_and_opened_again_loses_nothing(tmp_path):
    file = tmp_path / "log"
    for beside in (socket.socket(), nullcontext()):  # so that the two streams have unequal descriptors
        with beside, file.open("a") as stream:
            output.screen(stream).put(b"line\n")
            output.flush()
    assert file.read_text() == "line\n" * 2
