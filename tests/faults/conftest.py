"""Fixtures for the fault tests."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A separate file system with 8 MB."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here: apt-get install mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "cyxjax", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount needs root or CAP_SYS_ADMIN here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def run(pristine, tmp_path):
    """A copy of the checkpoint folder that the file's fixture `pristine` has created."""
    return Path(shutil.copytree(pristine, tmp_path / "run"))
