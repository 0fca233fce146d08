"""Reading stack dumps: the main thread, and the user's code in the threads it waits for."""

import faulthandler
import threading

import pytest

from cyxjax.launch.heartbeat import Progress
from cyxjax.launch.supervise import dump as stacks
from cyxjax.launch.supervise.watchdog import _in_different_calls, _refine


def block(kind: str, *frames: str) -> str:
    return "\n".join([f"{kind} 0x00007f (most recent call first):", *(f"  File {frame}" for frame in frames)])


SLOW = ('"/home/me/slow.py", line 9 in __getitem__', f'"{stacks._OURS[0]}data/prefetch.py", line 7 in _run')
WAITING = ('"/usr/lib/python3.11/threading.py", line 320 in wait', '"/home/me/train.py", line 3 in main')


IN_JAX = ('"/x/site-packages/jax/array.py", line 1 in value', '"/home/me/train.py", line 3 in main')
LIBRARY = (SLOW[1], '"/usr/lib/python3.11/threading.py", line 975 in run')


@pytest.mark.parametrize(
    ("thread", "main", "named", "at"),
    [
        (SLOW, WAITING, ["slow.py:9 __getitem__"], "train.py:3 main"),
        (SLOW, ('"/home/me/train.py", line 3 in loop',), [], "train.py:3 loop"),  # busy itself
        (SLOW, IN_JAX, [], "train.py:3 main"),  # waits for no thread
        (LIBRARY, WAITING, [], "train.py:3 main"),
    ],
)
def test_the_users_code_in_the_thread_that_is_waited_for_is_found(thread, main, named, at):
    older = block("Current thread", '"/old.py", line 1 in x')
    dump = "\n\n".join([older, block("Thread", *thread), block("Current thread", *main)])
    assert [str(frame) for frame in stacks.helpers(dump)] == named
    assert stacks.where(stacks.main_thread(dump)) == at
    assert stacks.is_inside_jax(stacks.main_thread(dump)) == (main is IN_JAX)
    assert stacks.where(stacks.main_thread("")) == ""


def test_a_real_dump_of_a_thread_is_read(tmp_path):
    """A dump of this process, taken by faulthandler as the launcher takes it, while it waits for a thread."""

    def slow_item():
        threading.Event().wait(1.0)  # the innermost frames are of a library

    thread = threading.Thread(target=slow_item)
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback_later(0.3, file=file)
        thread.start()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
    dump = (tmp_path / "stacks").read_text()
    # taken by a timer, no thread is the current one: the last block, the main thread, is taken for it
    assert "test_stacks.py" in stacks.where(stacks.main_thread(dump))
    assert any(frame.name == "slow_item" for frame in stacks.helpers(dump))


ELSEWHERE = ('"/x/site-packages/jax/array.py", line 1 in value', '"/home/me/train.py", line 9 in save')
OWN = ('"/home/me/train.py", line 5 in loop',)


@pytest.mark.parametrize(
    ("phase", "dumps", "blamed"),
    [
        ("step", (IN_JAX, IN_JAX, OWN), 2),  # the only one that is not in jax
        ("step", (IN_JAX, ELSEWHERE, IN_JAX), 1),  # the only one at its place
        ("step", (IN_JAX, ELSEWHERE), 0),  # either may be the one
        ("step", (OWN, OWN, IN_JAX), 2),
        ("step", (IN_JAX, IN_JAX, IN_JAX), 0),
        ("step", (IN_JAX,), 0),
        ("data", (IN_JAX, IN_JAX, OWN), 0),  # it is in a phase of its own
    ],
)
def test_where_all_wait_the_one_that_stands_elsewhere_is_waited_for(phase, dumps, blamed):
    frames = {rank: stacks.main_thread(block("Current thread", *dump)) for rank, dump in enumerate(dumps)}
    assert _refine(0, dict.fromkeys(frames, Progress(7, phase, 1.0, 0.0, 0.0)), frames) == blamed


def frames_of(*frames: str) -> list[stacks.Frame]:
    return stacks.main_thread(block("Current thread", *frames))


@pytest.mark.parametrize(
    ("clone", "installed"),
    [("/me/src", "/v/lib/python3.12/site-packages"), (None, "/v/site-packages"), (None, "/d/dist-packages")],
)
def test_ranks_that_wait_for_each_other_in_different_calls_are_said_to(clone, installed, monkeypatch):
    ours = f"{clone or installed}/cyxjax/"
    monkeypatch.setattr(stacks, "_OURS", (ours,))
    exchange = f'"{ours}distributed/agreement.py", line 43 in exchange'
    fit = f'"{ours}train/loop.py", line 9 in evaluate'
    inside = f'"{installed}/jax/array.py", line 1 in value'
    alone = frames_of(exchange, '"/home/me/train.py", line 19 in on_step', fit, IN_JAX[1])
    others = frames_of(inside, fit, IN_JAX[1])
    assert (stacks.where(alone), stacks.where(others)) == ("agreement.py:43 exchange", "loop.py:9 evaluate")
    assert "different calls" in _in_different_calls({0: alone, 1: others})
    assert _in_different_calls({0: others, 1: others}) == ""
    busy = frames_of('"/home/me/slow.py", line 9 in __getitem__', fit, IN_JAX[1])  # it does not wait
    assert _in_different_calls({0: busy, 1: others}) == ""
    assert _in_different_calls({0: alone, 1: []}) == ""  # it could not answer
