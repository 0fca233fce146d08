"""Every name in a run folder, said once. Nothing here opens, makes or writes anything."""

from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "checkpoints"  # unless the configuration names another folder
LOCK = "run.lock"


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
    def lock(self) -> Path:
        return self.root / LOCK

    @property
    def ledger(self) -> Path:
        """Which samples each step saw, a line a step."""
        return self.root / "ledger.jsonl"

    @property
    def history(self) -> Path:
        return self.root / "history.json"

    @property
    def goodput(self) -> Path:
        """Where the time went, over all restarts."""
        return self.root / "goodput.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def metrics_table(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    def black_box(self, step: int) -> Path:
        """What is needed to run a step again that was not finite."""
        return self.root / f"black_box_step{step}"
