"""A real Slurm of two nodes with two GPUs each, all on this machine: its daemons, srun and sbatch."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cyxjax.errors import GroupError
from cyxjax.launch.job_files import JobSpec, slurm_script, submit_slurm
from tests.support.engines import DONE, environment, run
from tests.support.launching import RANK, until
from tests.support.programs import free_port

pytestmark = [pytest.mark.multiprocess, pytest.mark.root, pytest.mark.usefixtures("scratch")]
SLURM_CONF = """ClusterName=onebox
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port0}
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool-%n
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/slurmd-%n.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MailProg=/bin/true
ReturnToService=2
GresTypes=gpu
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs={cores} RealMemory=2000 Gres=gpu:2
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs={cores} RealMemory=2000 Gres=gpu:2
PartitionName=debug Nodes=one,two Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


SHOW_DEVICES = """
import os, sys
from cyxjax.launch.environment import local_devices, visible_gpus
from cyxjax.launch.clusters import discover
place, gpus = discover(os.environ), visible_gpus(os.environ, sys.argv[1])
print(f"rank {place.rank} sees {gpus}, takes {local_devices(gpus, place.local_rank, place.local_world_size)}")
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm cluster of two nodes; yields the environment for its commands."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("Slurm is not installed: apt-get install slurmctld slurmd slurm-client")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root; run this test as root")
    folder = tmp_path_factory.mktemp("slurm")
    conf = write_cluster(folder)
    commands = [["slurmctld"], ["slurmd", "-N", "one"], ["slurmd", "-N", "two"]]
    daemons = [
        subprocess.Popen([*words, "-D", "-f", conf], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for words in commands
    ]
    try:
        if not until(lambda: _ask(conf, "sinfo", "-h", "-N", "-o", "%T") == [b"idle", b"idle"], 30):
            logs = [log.read_text()[-500:] for log in folder.glob("*.log")]
            pytest.skip(f"Slurm does not come up on this machine: {logs}")
        yield {"SLURM_CONF": str(conf)}
        # The daemon of a step outlives slurmd: it ends with the job.
        assert until(lambda: _ask(conf, "squeue", "-h") == [], 30), "jobs are left in the queue"
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def write_cluster(folder: Path) -> Path:
    """Writes the configuration, folders, and character devices in place of GPUs; its path."""
    for name in ("state", "spool-one", "spool-two"):
        (folder / name).mkdir()
    for gpu in range(2):
        os.mknod(folder / f"nvidia{gpu}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
    host, used = socket.gethostname().split(".")[0], {f"port{i}": free_port() for i in range(3)}
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(d=folder, host=host, cores=os.cpu_count(), **used))
    (folder / "gres.conf").write_text(f"NodeName=one,two Name=gpu File={folder}/nvidia[0-1]\n")
    return conf


def _ask(conf: Path, *command: str) -> list[bytes]:
    env = os.environ | {"SLURM_CONF": str(conf)}
    return subprocess.run(command, env=env, capture_output=True, check=False).stdout.split()


LAUNCHER = [sys.executable, "-m", "cyxjax.launch", "--nproc-per-node", "2", str(RANK)]


# Both nodes are this machine. Their names do not resolve, so MASTER_ADDR is set to it.
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("jax", ["-n2", "--overcommit", sys.executable, str(RANK)]),
        ("jax", ["-N2", "-n2", sys.executable, str(RANK)]),
        ("light", ["-n1", *LAUNCHER]),  # which starts the ranks
    ],
    ids=["ranks", "ranks on two nodes", "one launcher"],
)
def test_srun_starts_the_ranks(slurm, kind, words):
    done = run(["srun", *words], MASTER_ADDR="127.0.0.1", KIND=kind, **slurm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{DONE} 2") == 2


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        (("-N1", "-n2", "--gpus-per-task=1"), ["sees ['0'], takes None", "sees ['1'], takes None"]),
        (("-N1", "-n2", "--gpus=2"), ["sees ['0', '1'], takes [0]", "sees ['0', '1'], takes [1]"]),
        (("-N2", "--ntasks-per-node=1", "--gres=gpu:2"), ["sees ['0', '1'], takes None"] * 2),
    ],
    ids=["one GPU a task", "two tasks share two", "one task a node keeps both"],
)
def test_each_rank_takes_the_gpus_that_are_its_own(slurm, flags, seen):
    program = [sys.executable, "-c", SHOW_DEVICES, str(Path(slurm["SLURM_CONF"]).parent)]
    done = run(["srun", "--overcommit", *flags, *program], **slurm)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} {text}" for rank, text in enumerate(seen)]


def test_an_sbatch_script_is_accepted_and_runs_and_one_that_does_not_fit_is_refused(
    slurm, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    path = tmp_path / "small.sbatch"
    path.write_text(slurm_script(JobSpec(["x"], nodes=99)))
    with pytest.raises(GroupError, match="sbatch "):
        submit_slurm(str(path), check_only=True)
    spec = JobSpec(
        [sys.executable, str(RANK)], name="small", processes_per_node=1, memory_gib=1, time="00:05:00"
    )
    script = slurm_script(spec).replace("    python -m", f"    {sys.executable} -m")
    path.write_text(script.replace("%x-%j.log", f"{tmp_path}/out.log"))
    assert "to start at" in submit_slurm(str(path), check_only=True)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert "Submitted batch job" in submit_slurm(str(path))
    log = tmp_path / "out.log"
    assert until(lambda: log.exists() and DONE in log.read_text(), 90), (
        log.read_text() if log.exists() else ""
    )
