"""Numbers out of bounds, system limits and a deleted folder: one line and exit code 2."""

import os
import subprocess
import sys

import pytest

from cyxjax.errors import EXIT_CONFIG
from tests.support import forked
from tests.support.launching import RANK
from tests.support.programs import environment

pytestmark = pytest.mark.multiprocess
LAUNCH = [sys.executable, "-m", "cyxjax.launch"]
CONFIG = RANK.parents[2] / "configs" / "digits.yaml"
GONE = "mkdir gone && cd gone && rmdir ../gone"
LIMITS = {
    "more ranks than a host has": ("", [*LAUNCH, "--nproc-per-node", "10000000", RANK], "--nproc-per-node"),
    "no number": ("", [*LAUNCH, "--hang-timeout", "²", RANK], "--hang-timeout"),
    "a long wait": (f"export DISTRIBUTED_TIMEOUT_MS=1{'0' * 30}", [*LAUNCH, RANK], "DISTRIBUTED_TIMEOUT_MS"),
    "a folder below a file": ("", [*LAUNCH, "--log-dir", RANK / "logs", RANK], "--log-dir"),
    "files": ("ulimit -n 12", [*LAUNCH, "--nproc-per-node", "8", RANK], "ulimit -n"),
    "the launcher's folder is gone": (GONE, [*LAUNCH, "train.py"], "HINT"),
}


def is_one_line(done):
    return done.returncode == EXIT_CONFIG and done.stderr.count("\n") == 1 and "HINT: " in done.stderr


@pytest.mark.parametrize(("shell", "words", "named"), LIMITS.values(), ids=LIMITS)
def test_what_cannot_be_is_one_line(tmp_path, shell, words, named):
    command = ["bash", "-c", f'{shell or "true"} && exec "$@"', "bash", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment()
    )
    assert is_one_line(done), done
    assert named in done.stderr
    assert len(done.stderr) < 400


@pytest.mark.parametrize(("platform", "ranks"), [("xyz", 1), ("cuda", 2)])
def test_a_platform_that_is_not_here(platform, ranks, tmp_path):
    words = ["-m", "cyxjax.train", "--config", CONFIG, "--run-dir", tmp_path / "run"]
    words = [*LAUNCH[1:], "--nproc-per-node", str(ranks), *words] if ranks > 1 else words
    done = forked.run(words, os.environ | {"JAX_PLATFORMS": platform}, 60)
    assert done.returncode == EXIT_CONFIG
    assert is_one_line(done) or ranks > 1, done
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
