"""A state larger than the memory limit of a process trains in four processes with fsdp, not with mean."""

from pathlib import Path

import pytest

from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import find_problems, read_manifest
from tests.support import forked
from tests.support.programs import environments

JOB = Path(__file__).with_name("limited_rank.py")
RANKS, WIDTH, LAYERS = 4, 1536, 36
STATE_BYTES = 3 * 4 * WIDTH * WIDTH * LAYERS  # parameters and Adam's two moments: 1,019 MB
LIMIT_BYTES = 1_010_000_000
pytestmark = [pytest.mark.multiprocess, pytest.mark.wide, pytest.mark.timeout(600)]


def run(comm, folder):
    """(exit codes, output of the ranks). No forks and no launcher: they hold more memory from the start."""
    words = [JOB, comm, LIMIT_BYTES, WIDTH, LAYERS, folder]
    ranks = [(words, place) for place in environments(RANKS, NPROC=1)]
    done = forked.run_all(ranks, 500, fresh=forked.FRESH)
    return [rank.returncode for rank in done], "".join(rank.stdout + rank.stderr for rank in done)


def test_what_no_process_may_hold_is_trained_and_saved_by_four(tmp_path):
    assert STATE_BYTES > LIMIT_BYTES
    codes, text = run("fsdp", tmp_path / "parts")
    assert codes == [0] * RANKS, text
    assert text.count("trained") == RANKS
    folder = step_folder(tmp_path / "parts", 1)
    assert find_problems(folder, 1) == []
    manifest = read_manifest(folder)
    assert manifest.num_bytes > LIMIT_BYTES
    assert len(manifest.files) == RANKS


def test_the_same_whole_on_each_is_out_of_memory(tmp_path):
    codes, text = run("mean", tmp_path / "whole")
    assert 0 not in codes
    assert "memory" in text.lower()
    assert "trained" not in text
