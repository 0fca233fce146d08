"""The launcher's heart: this host's part of a job, started again where the budget allows."""

from collections.abc import Mapping

from cyxjax.errors import EXIT_OK, EXIT_PREEMPTED
from cyxjax.launch import output
from cyxjax.launch.failure import report
from cyxjax.launch.group.coordinator import Coordinator, warn_without_token
from cyxjax.launch.options import Options
from cyxjax.launch.supervise.restarts import Budget
from cyxjax.launch.supervise.start import Start
from cyxjax.launch.supervise.worker_group import WorkerGroup, code_after


class Supervisor:
    """Runs one job of a fixed size on this host. `run()` returns the exit code (see cyxjax.errors)."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        self._options = options
        self._host = Coordinator(options.place) if options.place.is_first else None
        self._workers = WorkerGroup(options, env)
        self._place = self._host.place if self._host else options.place
        warn_without_token(self._place, output.say)

    def run(self) -> int:
        """Starts the group, again where the budget allows, until it has ended for good."""
        with self._workers:
            try:
                return self._run_starts()
            finally:
                if self._host is not None:
                    self._host.end()

    def _run_starts(self) -> int:
        budget = Budget(self._options.max_restarts)
        number = 0
        while True:
            start = self._one_start(number)
            if start.signalled is not None and not start.records:
                return self._workers.after_signal(start)
            codes = {worker.returncode for worker in start.workers}
            if not start.records:
                return EXIT_PREEMPTED if EXIT_PREEMPTED in codes else EXIT_OK
            first = report.first_of(start.records, start.ended_early)
            decision = budget.decide(first, start.step, asked_to_end=start.signalled is not None)
            self._workers.tell(start, first, decision.line)
            if not decision.again:
                return decision.exit_code
            if (number_of_signal := self._workers.sleep(decision.delay_s)) is not None:
                return code_after(number_of_signal)
            number += 1

    def _one_start(self, number: int) -> Start:
        if self._host is None:
            return self._workers.run(self._place, number)
        self._host.open(number)
        try:
            return self._workers.run(self._place, number)
        finally:
            self._host.close()
