"""The first host of an elastic job: which of several hosts' errors came first."""

import json

from cyxjax.launch.elastic import registry
from cyxjax.launch.elastic.group_start import GroupStart, end_message
from cyxjax.launch.failure.record import ErrorRecord


def test_a_host_with_a_wrong_clock_does_not_get_another_rank_blamed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: now[0])
    current = GroupStart(3, ["cause", "follower"])

    def tells(agent, rank, clock_s, age_s, time_of_day_s):
        """A host whose monotonic clock stands at `clock_s` tells of an error `age_s` old."""
        record = ErrorRecord(rank, "ValueError", "", at_s=time_of_day_s, at_monotonic_s=clock_s - age_s)
        now[0] = clock_s
        message = json.loads(json.dumps(end_message(3, "failed", 7, [record])))
        now[0] = 100.0
        current.note_end(agent, message)

    # Rank 1 failed 0.5 s before rank 0, on a host that has been up longer and whose clock is an hour ahead.
    tells("follower", 0, clock_s=50.0, age_s=0.1, time_of_day_s=1_000_000.5)
    tells("cause", 1, clock_s=9_000.0, age_s=0.6, time_of_day_s=1_003_600.0)
    assert current.failure.rank == 1
    assert round(current.failure.at_monotonic_s, 3) == 99.4
