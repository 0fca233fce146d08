"""Numbers out of bounds, limits of the system and a folder that is gone: one line and exit code 2."""

import os
import subprocess
import sys

import pytest

from cyxjax.errors import EXIT_CONFIG
from tests.support import forked
from tests.support.launching import RANK

pytestmark = pytest.mark.multiprocess
LAUNCH = [sys.executable, "-m", "cyxjax.launch"]
CONFIG = RANK.parents[2] / "configs" / "digits.yaml"


def run(words, cwd=None, limit="", **env):
    """What `words` end with, under the `limit` of a shell."""
    command = ["bash", "-c", f'{limit or "true"} && exec "$@"', "bash", *map(str, words)]
    full = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"JAX_PLATFORMS": "cpu"} | env
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=full)


def is_one_line(done):
    return done.returncode == EXIT_CONFIG and done.stderr.count("\n") == 1 and "HINT: " in done.stderr


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--nproc-per-node", "10000000"], {}),
        (["--nproc-per-node", "²"], {}),
        (["--nnodes", "9" * 5000, "--node-rank", "0"], {}),
        (["--grace", "nan"], {}),
        (["--grace", "-1"], {}),
        (["--hang-timeout", "²"], {}),
        (["--max-restarts", "1" * 5000], {}),
        ([], {"RANK": "0", "WORLD_SIZE": "1000000000", "MASTER_ADDR": "127.0.0.1"}),
        ([], {"DISTRIBUTED_TIMEOUT_MS": "1" + "0" * 30}),
    ],
)
def test_a_number_out_of_bounds(words, env):
    done = run([*LAUNCH, *words, RANK], **env)
    assert is_one_line(done), done
    name = words[0] if words else [name for name in env if name != "MASTER_ADDR"][-1]
    assert name in done.stderr
    assert len(done.stderr) < 400


@pytest.mark.parametrize("words", [["--nproc-per-node", "2"], ["--nproc-per-node", "8"]])
def test_too_few_open_files(words):
    done = run([*LAUNCH, *words, RANK], limit="ulimit -n 12")
    assert is_one_line(done), done
    assert "ulimit -n" in done.stderr


@pytest.mark.parametrize(
    "words",
    [[*LAUNCH, "train.py"], [sys.executable, "-m", "cyxjax.train", "--config", CONFIG]],
    ids=["launch", "train"],
)
def test_a_working_folder_that_was_deleted(words, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run(words, limit=f"cd {gone} && rmdir {gone}")
    assert is_one_line(done), done


@pytest.mark.parametrize(("platform", "ranks"), [("xyz", 1), ("cuda", 2)])
def test_a_platform_that_is_not_here(platform, ranks, tmp_path):
    words = ["-m", "cyxjax.train", "--config", CONFIG, "--run-dir", tmp_path / "run"]
    words = [*LAUNCH[1:], "--nproc-per-node", str(ranks), *words] if ranks > 1 else words
    done = forked.run(words, os.environ | {"JAX_PLATFORMS": platform}, 60)
    assert done.returncode == EXIT_CONFIG
    assert is_one_line(done) or ranks > 1, done
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
