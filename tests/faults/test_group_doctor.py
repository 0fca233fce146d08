"""`cyxjax doctor` in a group of two real ranks with many problems, and with broken disks."""

import json
import os
import subprocess

import pytest

from cyxjax.cli.group_checks import own_file
from tests.support.forked import run_all
from tests.support.launching import LIMIT_S
from tests.support.programs import ROOT, environments


@pytest.mark.root
def test_a_full_or_read_only_run_folder_is_told(small_disk):
    stat = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes(stat.f_bavail * stat.f_frsize - 8192))
    with own_file(small_disk / "run", 0) as ((wrong,), _):
        assert "No space left on device" in wrong
    (small_disk / "ballast").unlink()
    with own_file(small_disk / "run", 0) as (wrong, _):
        assert wrong == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with own_file(small_disk / "run", 0) as ((wrong,), _):
        assert "Read-only file system" in wrong
    assert list(small_disk.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_that_differ_in_much_are_told_all_of_it(tmp_path):
    other = tmp_path / "site" / "optax-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    ranks = []
    for rank, env in enumerate(environments(2)):
        file = tmp_path / f"{rank}.yaml"
        file.write_text(f"epochs: {3 + rank}\ndata: {{name: digits}}\nrun_dir: {tmp_path / str(rank)}\n")
        if rank:
            env["PYTHONPATH"] = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
        ranks.append((["-m", "cyxjax.cli", "doctor", "--json", "--config", str(file)], env))
    first, second = run_all(ranks, LIMIT_S, tmp_path)
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    found = json.loads(first.stdout)  # without gloo's messages, which also go to stdout
    wrong = {row["topic"]: row["found"] for row in found["checks"] if row["level"] != "ok"}
    assert (found["good"], set(wrong)) == (False, {"versions", "config", "folder"})
    assert "9.9.9 on rank 1" in wrong["versions"]
    assert "epochs: 3 on rank 0; 4 on rank 1" in wrong["config"]
    assert "does not see" in wrong["folder"]
    fine = {row["topic"] for row in found["checks"]} - {*wrong}
    assert fine >= {"group", "ports", "clocks", "data", "wires"}
    assert second.stdout == ""
