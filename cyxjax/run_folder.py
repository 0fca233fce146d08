"""All names in a run folder. Nothing here opens, creates or writes a file."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cyxjax.errors import ConfigError

CHECKPOINTS = "checkpoints"  # unless the configuration names another folder
LOCK = "run.lock"
# May be in a folder without a run: hidden files, logs of a launcher or a batch system, and on a host with a
# folder of its own the profiles of its ranks.
_BESIDE_A_RUN = re.compile(r"\..*|lost\+found|logs?|.*\.(log|out|err)|profile")


class _Inside:
    """A path below the root of a `RunFolder`, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.root / self._name


@dataclass(frozen=True)
class RunFolder:
    """Where one run keeps what it records; the configuration may put `checkpoints` outside of `root`."""

    root: Path
    checkpoint_dir: str = CHECKPOINTS

    config = _Inside("config.yaml")  # the resolved configuration of the newest start
    data = _Inside("data.json")  # what a model must know about the data, to be rebuilt without them
    lock = _Inside(LOCK)
    ledger = _Inside("ledger.jsonl")  # which samples each step used, one line per span of steps
    bits = _Inside("bits.jsonl")  # digests of an exact run's state, at regular intervals
    history = _Inside("history.json")
    goodput = _Inside("goodput.json")  # where the time went, over all restarts
    events = _Inside("events.jsonl")  # starts, saves, rollbacks, ends
    report = _Inside("report.html")  # the page that shows the run
    metrics = _Inside("metrics.jsonl")
    metrics_table = _Inside("metrics.csv")
    tensorboard = _Inside("tensorboard")

    @property
    def checkpoints(self) -> Path:
        return self.root / self.checkpoint_dir

    @property
    def logs(self) -> tuple[Path, ...]:
        """The files a run writes about itself, besides checkpoints and a tracker's files."""
        tables = (self.history, self.metrics, self.metrics_table, self.events, self.report)
        return self.data, self.config, self.ledger, self.bits, self.goodput, *tables

    def profile(self, rank: int) -> Path:
        """Traces of a rank, and the page that summarizes them."""
        return self.root / "profile" / f"rank_{rank}"

    def black_box(self, step: int, place: tuple[int, int] | None = None) -> Path:
        """What is needed to rerun a step that was not finite. place: (epoch, sample) at which it began, for a
        step that has the number of another one.
        """
        where = "" if place is None else f"_epoch{place[0] + 1}_sample{place[1]}"
        return self.root / f"black_box_step{step}{where}"

    def refuse_unusable(self) -> None:
        """Raises: ConfigError for a folder that cannot be created, or that holds other files and no run."""
        for key, path in (("run_dir", self.root), ("checkpoint_dir", self.checkpoints)):
            path = Path(os.path.abspath(path))
            there = next(one for one in (path, *path.parents) if os.path.lexists(one))
            if not there.is_dir():
                raise ConfigError(f"{key}={path}: {there} is not a folder. HINT: name another.", key=key)
        found = sorted(os.listdir(self.root)) if self.root.is_dir() else []
        inside = self.checkpoints.is_relative_to(self.root)
        steps = list(self.checkpoints.glob("step_*")) if inside else []
        if steps or {self.lock.name, self.ledger.name}.intersection(found):
            return  # `lock` is the first file of a run; versions that locked elsewhere begin with `ledger`
        own = self.checkpoints.relative_to(self.root).parts[:1] if inside else ()
        other = [name for name in found if name not in own and not _BESIDE_A_RUN.fullmatch(name)]
        if other:
            raise ConfigError(
                f"run_dir={self.root}: the folder holds no run, but {len(other)} other files or folders "
                f"({', '.join(other[:3])}). HINT: name a new or an empty folder.",
                key="run_dir",
            )

    def refuse_to_replace_config(self) -> None:
        """Raises: ConfigError if `config` is not an experiment's, which writes `data` before it."""
        if os.path.lexists(self.config) and not os.path.lexists(self.data):
            raise ConfigError(
                f"run_dir={self.root}: {self.config} is not from an experiment, which would replace it. "
                "HINT: rename the file, or name a new run_dir.",
                key="run_dir",
            )
