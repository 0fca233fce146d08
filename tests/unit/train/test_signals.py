"""Signals of the operating system: a stop after a save, the end at the second signal, a checkpoint."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from cyxjax.errors import EXIT_INTERRUPT
from cyxjax.launch import save_request
from cyxjax.launch.save_request import ONE_REQUEST_S
from cyxjax.train.signals import StopSignals


class Ended(Exception):
    """Raised instead of ending this process."""


@pytest.fixture
def ends(monkeypatch):
    """The exit codes this process would have ended with."""
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr("os._exit", end)
    return codes


@pytest.fixture
def handler():
    """Sets a handler from before the training, and restores pytest's own."""
    kept = []

    def put(number, action):
        kept.append((number, signal.signal(number, action)))

    yield put
    for number, action in reversed(kept):
        signal.signal(number, action)


@pytest.fixture
def clock(monkeypatch):
    """The clock that the signal code reads; the test sets it."""
    now_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, Ended), (signal.SIGHUP, Ended), (signal.SIGINT, KeyboardInterrupt)]
)
def test_the_first_asks_for_a_stop_and_the_second_ends_the_process(number, end, ends, handler, clock):
    handler(number, signal.SIG_DFL)
    with StopSignals() as signals:
        assert signals.reason() is None
        signal.raise_signal(number)
        assert (signals.received, ends) == (number, [])
        clock[0] += ONE_REQUEST_S
        with pytest.raises(end):
            signal.raise_signal(number)
    assert ends == ([128 + number] if end is Ended else [])  # Ctrl-C interrupts as ever
    assert signal.getsignal(number) is signal.SIG_DFL


def test_signals_within_two_seconds_are_one_request_also_after_the_training(ends, handler, clock):
    handler(signal.SIGTERM, signal.SIG_DFL)
    handler(signal.SIGINT, signal.default_int_handler)
    with StopSignals() as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
            clock[0] += 0.6
    signal.raise_signal(signal.SIGINT)
    assert (signals.received, ends) == (signal.SIGTERM, [])
    clock[0] += 0.3
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_handler_that_was_there_is_called_before_the_end(ends, handler, clock):
    received = []
    handler(signal.SIGINT, lambda number, frame: received.append(number))
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        assert received == []
        clock[0] += ONE_REQUEST_S
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGINT)
    assert (received, ends) == ([signal.SIGINT], [EXIT_INTERRUPT])


def test_what_was_ignored_stays_ignored_and_sigusr1_asks_for_a_checkpoint(handler):
    handler(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGUSR1)
        assert signals.reason() is None
        assert [save_request.take(), save_request.take()] == [True, False]


def test_outside_the_main_thread_nothing_is_caught(handler):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def look():
        with StopSignals():
            return {number: signal.getsignal(number) for number in before}

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result() == before
