"""Trains an experiment in forked processes, each a rank started by hand, with an injected fault."""

from pathlib import Path
from typing import NamedTuple

from cyxjax.errors import EXIT_OK
from tests.support.forked import Program
from tests.support.programs import environment, environments

RANK = Path(__file__).with_name("training_job.py")
LIMIT_S = 90  # for a run that takes seconds: the machine may be shared


class Ended(NamedTuple):
    """The exit codes of the ranks of one run. `text` is their output."""

    codes: list[int]
    text: str


def run(config: Path, *argv: object, world: int = 1, fault: str = "", code: int | None = EXIT_OK) -> Ended:
    """Trains `config` in `world` processes. code: the expected exit code of each; None: any."""
    ended = wait(start(config, *argv, world=world, fault=fault))
    assert code is None or set(ended.codes) == {code}, f"{ended.codes}: {ended.text}"
    return ended


def start(config: Path, *argv: object, world: int = 1, fault: str = "") -> list[Program]:
    """The ranks of a run that begins. fault: see training_job.py."""
    words = ["-W", "ignore", RANK, fault, "--config", config, *argv]
    return [Program(words, env) for env in (environments(world) if world > 1 else [environment()])]


def wait(ranks: list[Program]) -> Ended:
    """Waits until all of `ranks` have ended."""
    texts = ["".join(rank.communicate(LIMIT_S)) for rank in ranks]
    return Ended([rank.wait() for rank in ranks], "".join(texts))
