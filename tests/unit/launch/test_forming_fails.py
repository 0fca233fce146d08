"""Rank 0 by hand holds the meeting place in its own process, which ends with it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch import connect
from cyxjax.launch.group import client, ports
from cyxjax.launch.group.coordinator import Coordinator
from cyxjax.launch.group.rendezvous import Rendezvous
from cyxjax.launch.topology import Topology


def test_all_are_told_why_no_group_forms_before_rank_0_ends(monkeypatch):
    # Rank 0 hears it first, and the meeting place stands still: rank 1 knocked at a closed door for a minute.
    told, ending, end = [], threading.Event(), Coordinator.end

    def tell_all(self, message):
        for peer in sorted(self.peers, key=lambda peer: peer.hello.rank):
            if told:
                ending.wait(10)
            peer.connection.send(message)
            told.append(peer.hello.rank)

    monkeypatch.setattr(Rendezvous, "_send_all", tell_all)
    monkeypatch.setattr(Coordinator, "end", lambda self: (ending.set(), end(self)))
    with ports.listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    rank_0, rank_1 = (
        Topology(rank, 2, master_port=port, token="secret", timeout_ms=20_000) for rank in range(2)
    )
    host = connect._coordinate(rank_0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.join, rank_1, {"program": "other.py"})
        with pytest.raises(GroupError, match=r"program: .*train\.py .*rank 0; other\.py .*rank 1"):
            connect._meet(rank_0, {"program": "train.py"}, host)
        heard = list(told)  # when the process would end
        ending.set()
        with pytest.raises(GroupError, match="program: "):
            other.result(30)
    assert heard == [0, 1]
