"""Ctrl-C in a block that must not be cut in two."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from cyxjax.launch.interrupts import interrupted_at_end
from cyxjax.train.checks import order
from tests.support.trainers import QUIET, X, Y, trainer


@pytest.fixture(autouse=True)
def handled():
    """Sets a handler, Python's at first; restores the one before, as that of a fit that a signal ended."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, usual)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_raises_at_the_end_and_a_second_one_at_once():
    done = []

    @interrupted_at_end()
    def work(presses):
        for number in range(presses):
            press()
            done.append(number)

    for presses in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            work(presses)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done == [0, 0]


def test_one_that_python_dropped_raises_at_the_end():
    done = []

    @interrupted_at_end(also_at_once=True)
    def work():
        with suppress(KeyboardInterrupt):
            press()
            done.append("at once")
        done.append("later")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["later"]


def test_a_handler_that_does_not_raise_is_called_once(handled):
    calls = []
    handled(lambda number, frame: calls.append(number))
    with interrupted_at_end(also_at_once=True):
        press()
    assert calls == [signal.SIGINT]


def test_a_handler_that_has_replaced_itself_does_not_come_back(handled):
    """As that of a fit that Ctrl-C ended: it restores the usual one at the next Ctrl-C."""

    def once(number, frame):
        handled(signal.default_int_handler)
        press()

    @interrupted_at_end(also_at_once=True)
    def work():
        press()

    handled(once)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored(handled):
    handled(signal.SIG_IGN)
    with interrupted_at_end():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_set_no_handler():
    def work():
        with interrupted_at_end():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() is signal.default_int_handler


def test_a_fit_does_not_train_after_an_interrupt_that_was_dropped_while_it_was_prepared(group, monkeypatch):
    one, compare = trainer(), order.compare_ranks

    def interrupted(*args):
        with suppress(KeyboardInterrupt):
            press()
        return compare(*args)

    with monkeypatch.context() as patch:
        patch.setattr(order, "compare_ranks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.fit(X, Y, **QUIET)
    assert one.fit(X, Y, **QUIET).num_steps
