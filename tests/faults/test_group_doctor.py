"""`cyxjax doctor` in a group of two real ranks in which much is wrong, and on disks that are."""

import json
import os
import subprocess
import sys

import pytest

from cyxjax.cli.group_checks import own_file
from tests.faults.test_checkpoint_disk import fill_until_free
from tests.support.engines import free_port
from tests.support.launching import LIMIT_S


@pytest.mark.root
def test_a_full_or_read_only_run_folder_is_told(small_disk):
    fill_until_free(small_disk, 8192)
    with own_file(small_disk / "run", 0) as (error, _):
        assert error == "No space left on device"
    (small_disk / "ballast").unlink()
    with own_file(small_disk / "run", 0) as (error, _):
        assert error == ""
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with own_file(small_disk / "run", 0) as (error, _):
        assert error == "Read-only file system"
    assert list(small_disk.iterdir()) == []


@pytest.mark.slow  # two processes that load everything: 8 s of CPU time
def test_two_ranks_that_differ_in_much_are_told_all_of_it(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    other = tmp_path / "site" / "optax-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    ranks, port = [], free_port()
    for rank, folder in enumerate(folders):
        folder.mkdir()
        epochs = f"epochs: {3 + rank}\n"
        (folder / "x.yaml").write_text(f"{epochs}data: {{name: digits}}\nrun_dir: {folder / 'run'}\n")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_NUM", "XLA_", "NPROC"))}
        env |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        site = f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env |= {"JAX_PLATFORMS": "cpu"} | ({"PYTHONPATH": site} if rank else {})
        words = [sys.executable, "-m", "cyxjax.cli", "doctor", "--json", "--config", "x.yaml"]
        ranks.append(
            subprocess.Popen(
                words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        told = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], told
    found = json.loads(told[0][0])  # nothing of gloo's, which talks on standard output, too
    rows = found["checks"]
    assert not found["good"]
    wrong = {row["topic"]: row["found"] for row in rows if row["level"] != "ok"}
    assert set(wrong) == {"versions", "config", "folder"}
    assert "9.9.9 on rank 1" in wrong["versions"]
    assert "epochs: 3 on rank 0; 4 on rank 1" in wrong["config"]
    assert "does not see" in wrong["folder"]
    fine = {row["topic"] for row in rows if row["level"] == "ok"}
    assert fine >= {"group", "ports", "clocks", "data", "wires", "training"}
    assert told[1][0] == ""
