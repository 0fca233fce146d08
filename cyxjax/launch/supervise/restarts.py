"""Whether a failed group is started again, and when: a budget of restarts that progress renews."""

import random
from dataclasses import dataclass, field

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE, EXIT_USER_ERROR
from cyxjax.launch.failure.record import ErrorRecord

MAX_WITHOUT_PROGRESS = 3
LONGEST_DELAY_S = 60.0


@dataclass(frozen=True)
class Decision:
    """What to do after a failed start, and why; the exit code counts when it is not started again."""

    again: bool
    why: str
    delay_s: float = 0.0
    exit_code: int = EXIT_INFRASTRUCTURE

    @property
    def line(self) -> str:
        """For the terminal: 'restart 1 of 3' or 'not started again: ...'."""
        return self.why if self.again else f"not started again: {self.why}"


@dataclass
class Budget:
    """Remembers the failures of one job. `best_step` is the furthest step any rank has told of."""

    max_restarts: int
    used: int = 0
    best_step: int = -1
    without_progress: int = 0
    signatures: set[tuple[str, str, str, int]] = field(default_factory=set)

    def decide(self, first: ErrorRecord, step: int, *, asked_to_end: bool = False) -> Decision:
        """What follows a start that ended with `first`, after the group had come to `step`.

        asked_to_end: a signal told the launcher to stop meanwhile, which it does.

        The first restart after progress comes at once; without progress they wait 1, 2, 4 ... 60 s.
        """
        progressed = step > self.best_step and self.used > 0
        self.best_step = max(self.best_step, step)
        self.without_progress = 0 if progressed else self.without_progress + 1
        repeated = first.exit_code == EXIT_USER_ERROR and first.signature in self.signatures
        self.signatures.add(first.signature)
        if asked_to_end:
            return Decision(False, "it was asked to end", exit_code=first.exit_code)
        if first.exit_code == EXIT_CONFIG:
            return Decision(False, "a configuration error does not go away", exit_code=first.exit_code)
        if repeated:
            why = f"the same error at step {first.step} again: a restart does not cure it"
            return Decision(False, why, exit_code=first.exit_code)
        if self.max_restarts == 0:
            return Decision(False, "--max-restarts is 0", exit_code=first.exit_code)
        if self.used >= self.max_restarts:
            return Decision(False, f"all {self.max_restarts} restarts are used")
        if self.without_progress > MAX_WITHOUT_PROGRESS:
            return Decision(
                False, f"{MAX_WITHOUT_PROGRESS} restarts came no further than step {self.best_step}"
            )
        self.used += 1
        return Decision(True, f"restart {self.used} of {self.max_restarts}", self._delay_s())

    def _delay_s(self) -> float:
        if self.used == 1 or self.without_progress == 0:
            return 0.0
        delay = min(LONGEST_DELAY_S, 2.0 ** (self.without_progress - 2))
        return delay * random.uniform(0.8, 1.2)  # hosts that failed together do not come back together
