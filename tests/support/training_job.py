"""One rank of a training with an injected fault, for jobs.py: FAULT, and the words of `cyxjax train`.

A fault is "what:rank:phase:step[:times]": at that moment of that rank a signal ("KILL",
"TERM", "INT") is sent to itself, "times" times (default 1). The phase is the one that the rank reports to the
supervisor (`beat`), or "write": the background write of the checkpoint of that step, a few milliseconds after
it began; where ranks write together, "share": before that rank's own file, and "publish": when all files are
written, before the manifest.
"FLIP:rank:bit:step" changes a bit of that rank's parameters instead, "FILL:rank:write:step:FOLDER" fills the
disk of FOLDER just before that write, "STALL:rank:phase:step:seconds" delays the rank by that time, and
"SINK:rank:PATH:0" makes the first write of a metrics tracker wait until that file exists.
"PATIENCE:rank:mirror:seconds" is how long a run that ends waits for a store that accepts nothing.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cyxjax.cli import main as cli
from cyxjax.launch.save_request import ONE_REQUEST_S


def plan_fault(text: str, rank: int) -> None:
    what, at_rank, phase, step, *rest = text.split(":")
    if rank != int(at_rank):
        return
    if what == "FLIP":
        flip_a_bit(int(step))
    elif what == "SINK":
        slow_tracker(Path(phase))
    elif what == "PATIENCE":
        from cyxjax.checkpoint import mirror

        mirror.STALL_S = float(step)
    elif what == "FILL":
        from cyxjax.train.hooks import saving

        saving.LAST_SAVE_S = saving.HURRIED_SAVE_S = 0.5
        strike_before(SHARING["share"], int(step), lambda: fill(Path(*rest)))
    elif what == "STALL":
        strike_at_a_beat(phase, int(step), lambda: time.sleep(float(*rest)))
    else:
        plan_signals(signal.Signals[f"SIG{what}"], phase, int(step), int(*rest or ["1"]))


def plan_signals(number: signal.Signals, phase: str, step: int, times: int) -> None:
    def strike() -> None:
        for i in range(times):
            time.sleep(1.1 * ONE_REQUEST_S * (i > 0))  # sooner it would count as the same request
            os.kill(os.getpid(), number)

    if phase == "write":
        strike_before(SHARING["share"], step, lambda: soon(strike))
    elif phase in SHARING:
        strike_before(SHARING[phase], step, strike)
    else:
        strike_at_a_beat(phase, step, strike)


def soon(strike: Any) -> None:
    """Calls `strike` at a random moment of the save that begins now, which takes about 30 ms."""
    delay_s = int.from_bytes(os.urandom(1), "big") / 255 * 0.03
    threading.Thread(target=lambda: (time.sleep(delay_s), strike()), daemon=True).start()


def strike_at_a_beat(phase: str, step: int, strike: Any) -> None:
    from cyxjax.train import loop

    real, left = loop.report_progress, [strike]

    def report_and_strike(now: int, where: str) -> None:
        real(now, where)
        if now >= step and where == phase and left:
            left.pop()()

    loop.report_progress = report_and_strike


def flip_a_bit(step: int) -> None:
    """Flips a mantissa bit of the first parameter, only in this process, when hooks next see the state."""
    from cyxjax.train.loop import Loop

    real, left = Loop._show_state, [step]

    def showing(self: Any) -> None:
        if self._position.step >= step and left:
            left.clear()
            self._state = self._state._replace(params=flipped(self._state.params))
        real(self)

    Loop._show_state = showing  # type: ignore[method-assign]


def flipped(params: Any) -> Any:
    import jax

    from tests.support.flips import flip

    first, *others = jax.tree.leaves(params)
    return jax.tree.unflatten(jax.tree.structure(params), [flip(first, 0, bit=3), *others])


def fill(folder: Path) -> None:
    """Leaves no byte free on the file system of `folder`."""
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def slow_tracker(path: Path) -> None:
    """Replaces the sink of Weights & Biases: each write waits for `path` and prints a line."""
    from cyxjax.observe import tracker_sinks
    from cyxjax.observe.sinks import NullSink

    class Slow(NullSink):
        def __init__(self, *args: Any) -> None: ...

        def log(self, record: Any) -> None:
            while not path.exists():
                time.sleep(0.02)
            print("tracked", *record, flush=True)

    tracker_sinks.wandb_sink = Slow


SHARING = {"share": "write_share", "publish": "notes_in"}


def strike_before(name: str, step: int, strike: Any) -> None:
    """Calls `strike` before a function of saves, which takes the step's folder first."""
    from cyxjax.checkpoint import writers

    real, left = getattr(writers, name), [strike]

    def calling(folder: Path, *args: Any) -> Any:
        if int(folder.name.split(".")[0].removeprefix("step_")) >= step and left:
            left.pop()()
        return real(folder, *args)

    setattr(writers, name, calling)


if __name__ == "__main__":
    fault, *argv = sys.argv[1:]
    if fault:
        plan_fault(fault, int(os.environ.get("RANK", "0")))
    sys.exit(cli.main(["train", *argv]))
