"""All names in a run folder. Nothing here opens, creates or writes a file."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cyxjax.errors import ConfigError

CHECKPOINTS = "checkpoints"  # unless the configuration names another folder
LOCK = "run.lock"
# May be in a run's folder before its first start: hidden files, logs of a launcher or a batch system.
_BESIDE_A_RUN = re.compile(r"\..*|lost\+found|logs?|.*\.(log|out|err)")


@dataclass(frozen=True)
class RunFolder:
    """Where one run keeps what it records; the configuration may put `checkpoints` outside of `root`."""

    root: Path
    checkpoint_dir: str = CHECKPOINTS

    @property
    def checkpoints(self) -> Path:
        return self.root / self.checkpoint_dir

    @property
    def config(self) -> Path:
        """The resolved configuration of the newest start."""
        return self.root / "config.yaml"

    @property
    def data(self) -> Path:
        """What a model must know about the data, so that the run's model can be rebuilt without them."""
        return self.root / "data.json"

    @property
    def lock(self) -> Path:
        return self.root / LOCK

    @property
    def ledger(self) -> Path:
        """Which samples each step used, one line per step."""
        return self.root / "ledger.jsonl"

    @property
    def bits(self) -> Path:
        """Digests of an exact run's state, at regular intervals."""
        return self.root / "bits.jsonl"

    @property
    def history(self) -> Path:
        return self.root / "history.json"

    @property
    def goodput(self) -> Path:
        """Where the time went, over all restarts."""
        return self.root / "goodput.json"

    @property
    def events(self) -> Path:
        """The events of the run: starts, saves, rollbacks, ends."""
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        """The page that shows the run."""
        return self.root / "report.html"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def metrics_table(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def logs(self) -> tuple[Path, ...]:
        """The files a run writes about itself, besides checkpoints and a tracker's files."""
        tables = (self.history, self.metrics, self.metrics_table, self.events, self.report)
        return self.config, self.data, self.ledger, self.bits, self.goodput, *tables

    def profile(self, rank: int) -> Path:
        """Traces of a rank, and the page that summarizes them."""
        return self.root / "profile" / f"rank_{rank}"

    def black_box(self, step: int) -> Path:
        """What is needed to rerun a step that was not finite."""
        return self.root / f"black_box_step{step}"

    def refuse_unusable(self) -> None:
        """Raises: ConfigError for a folder that cannot be created, or that holds other files and no run."""
        for key, path in (("run_dir", self.root), ("checkpoint_dir", self.checkpoints)):
            path = Path(os.path.abspath(path))
            there = next(one for one in (path, *path.parents) if os.path.lexists(one))
            if not there.is_dir():
                raise ConfigError(f"{key}={path}: {there} is not a folder. HINT: name another.", key=key)
        found = sorted(os.listdir(self.root)) if self.root.is_dir() else []
        inside = self.checkpoints.is_relative_to(self.root) and self.checkpoints != self.root
        first = [self.checkpoints.relative_to(self.root).parts[0]] if inside else []
        own = (self.lock, self.tensorboard, *self.logs)
        if {path.name for path in own}.union(first).intersection(found):
            return
        if other := [name for name in found if not _BESIDE_A_RUN.fullmatch(name)]:
            raise ConfigError(
                f"run_dir={self.root}: the folder holds no run, but {len(other)} other files or folders "
                f"({', '.join(other[:3])}). HINT: name a new or an empty folder.",
                key="run_dir",
            )
