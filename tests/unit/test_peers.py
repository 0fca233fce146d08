"""What peers.py makes of its turns: medians, ratios of neighbours, and cells that say why they are empty."""

import argparse
import importlib
import signal
import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("peers")


def test_a_row_holds_medians_and_the_ratio_of_turns_that_followed_each_other(peers):
    # ours / torch turn by turn: 2, 0.5, 1 -> 1, though the medians' ratio is 20 / 10 = 2
    turns = {"ours": [20.0, 5.0, 30.0], "torch": [10.0, 10.0, 30.0], "keras": ["not run: no keras"]}
    args = argparse.Namespace(peers=list(turns), turns=3, device="cpu", peak_tflops=None)
    row = peers.table({"mlp, 1 process": turns}, args).splitlines()[-1]
    assert row == "| mlp, 1 process | 20 | 10 (1.00) | not run: no keras |"


def test_the_last_result_is_read_and_what_failed_is_said(peers):
    out = 'progress\n[rank 0] {"samples_per_s": 1.5}\n'
    assert peers.read(out, "") == 1.5
    errors = "Traceback\nModuleNotFoundError: No module named 'torch'\n"
    assert peers.read("", errors) == "not run: ModuleNotFoundError: No module named 'torch'"
    assert peers.read("", "") == "not run: no result"


def test_the_table_is_written_between_the_marks_only(peers, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text((BENCH / "README.md").read_text())
    peers.write(readme, "the table", "peers")
    before, after = (BENCH / "README.md").read_text().splitlines(), readme.read_text().splitlines()
    place = after.index("the table")
    assert after[:place] == before[:place]
    assert after[place + 1 :] == before[before.index("<!-- peers: end -->") :]


def test_what_takes_too_long_is_ended_and_said(peers, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        peers.subprocess, "Popen", lambda *a, **kw: started.append(popen(*a, **kw)) or started[0]
    )
    assert peers.run(["sleep", "600"], devices=1, limit_s=0.2) == ("", "nothing within 0.2 s")
    assert started[0].returncode == -signal.SIGKILL


def test_a_cell_of_growth_that_gave_nothing_says_why(peers):
    growth = importlib.import_module("growth")
    assert growth._row("progress\n[120.4, 5e-05]\n", "") == "120 | 50 us"
    assert growth._row("", "nothing within 2 s") == "not run: nothing within 2 s |"
