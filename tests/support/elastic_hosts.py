"""Launchers that act as the hosts of one job, of fixed or changing size, all on loopback."""

import re
import secrets
from collections.abc import Callable
from pathlib import Path

from tests.support.launching import RANK, Run, start, until
from tests.support.programs import free_port


class Hosts:
    """Launchers of one job of `sizes` ("1:3", or "2"). `add` starts one; `close` kills whatever still runs.

    rank.py trains until the file `enough` exists, unless `add` sets STEPS. program: the words after the
    launcher's flags on every host. fork: as in `start`. address: of the first host. env: for every host.
    """

    def __init__(
        self,
        folder: Path,
        sizes: str,
        *program: str,
        fork: bool = False,
        address: str = "127.0.0.1",
        **env: object,
    ) -> None:
        self.job, self.runs = f"elastic-{secrets.token_hex(6)}", list[Run]()
        self._folder, self._program, self._fork, self._env = folder, program or (str(RANK),), fork, env
        self.enough = folder / "enough"
        self._flags = ["--nnodes", sizes, "--master-addr", address, "--master-port", str(free_port())]
        self._flags += ["--run-id", self.job, "--grace", "5"]

    def add(self, *flags: str, nproc: int = 1, node_rank: int | None = None, **env: object) -> Run:
        """Starts one more host, in the order of hosts. node_rank: for one that replaces another host.

        env: also `wrap`, as in `start`.
        """
        number = len(self.runs)
        folder = self._folder / str(number)
        folder.mkdir(parents=True)
        base = {"KIND": "light", "CYXJAX_TOKEN": "t" * 64, "ON_TERM": "save", "DISTRIBUTED_TIMEOUT_MS": 30000}
        base |= {"STEPS": 100_000, "UNTIL": self.enough}
        is_fixed = ":" not in self._flags[1]
        place = ["--node-rank", str(number if node_rank is None else node_rank)]
        place = place if number == 0 or is_fixed else []
        *words, last = self._program
        words = [*self._flags, *place, *flags, *words]
        run = start(folder, nproc, *words, script=Path(last), fork=self._fork, **(base | self._env | env))
        run.run_id = self.job
        self.runs.append(run)
        return run

    def wait_for_start(self, number: int, *runs: Run) -> None:
        """Waits until a rank of each of `runs` (default: all) has trained in start `number`."""
        assert until(lambda: all(says(run, number, "under way") for run in runs or self.runs), 90)

    def end(self, *runs: Run) -> None:
        """Ends the training; all of `runs` (default: all hosts) must exit with code 0."""
        self.enough.touch()
        for run in runs or self.runs:
            assert run.wait().code == 0, run.err

    def close(self) -> None:
        """Kills what still runs; afterwards no process of the job may be left."""
        for run in self.runs:
            if not run.out and not run.err:  # not waited for
                run.process.kill()
                run.process.communicate()
        assert all(run.no_survivors_within(10) for run in self.runs[:1])  # all hosts share the run id


def says(run: Run, start: int, text: str) -> bool:
    """True once a rank of `run` has written `text` in start number `start`."""
    return any(text in log.read_text() for log in run.log_dir.glob(f"start_{start}/rank_*.log"))


def finished(run: Run, start: int, total: int) -> int:
    """How many ranks of `run` have ended their training in start number `start`, of `total` ranks."""
    return len(re.findall(rf"finished \d+ steps, start {start}, total {total}$", run.out, re.MULTILINE))


def two_then_one_then_two(hosts: Hosts, newest_step: Callable[[], int], kill_at: int) -> Run:
    """Runs two hosts, kills one after step `kill_at`, adds a third, and waits for the end; the first host."""
    first, second = hosts.add(), hosts.add()
    assert until(lambda: newest_step() >= kill_at, 120)
    second.process.kill()
    assert until(lambda: says(first, 1, "Resuming from step"), 120)
    alone_at = newest_step()
    assert until(lambda: newest_step() > alone_at, 120)
    for run in (first, hosts.add()):
        assert run.wait().code == 0, run.err
    for number, size in enumerate((2, 1, 2)):
        assert f"start {number}: {size} host(s), {size} rank(s)" in first.err
    return first
