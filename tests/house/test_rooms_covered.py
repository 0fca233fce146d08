"""`make cover` ends with the share of each room."""

import json
import subprocess
from types import SimpleNamespace

from scripts import rooms_covered


def test_rooms_are_added_up_and_the_least_covered_stands_first(monkeypatch, capsys):
    counts = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    files = {
        "cyxjax/core/a.py": (8, 8, 2, 2),
        "cyxjax/sync/b.py": (5, 4, 0, 0),
        "cyxjax/core/x/c.py": (9, 9, 1, 0),
    }
    told = {"files": {name: {"summary": dict(zip(counts, n, strict=True))} for name, n in files.items()}}
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: SimpleNamespace(stdout=json.dumps(told)))
    rooms_covered.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["sync", "5", "4", "0", "0", "80.0%"], ["core", "17", "17", "3", "2", "95.0%"]]
