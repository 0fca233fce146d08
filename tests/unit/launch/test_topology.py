"""The topology that each source gives a process, and what the errors name."""

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import claims, discover
from cyxjax.launch.topology import Topology

OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
TWO_HOSTS = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
EVERYTHING = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "DISTRIBUTED_BACKEND": "CPU",
    "DISTRIBUTED_TIMEOUT_MS": "5000",
    "RESTART_COUNT": "3",
}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        # rank, world size, local rank, ranks on this host, address
        ({}, (0, 1, 0, 1, "127.0.0.1:29500")),
        ({"WORLD_SIZE": "1"}, (0, 1, 0, 1, "127.0.0.1:29500")),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4, 2, 4, "127.0.0.1:29500")),  # on loopback, so all are here
        (EVERYTHING, (2, 4, 0, 0, "10.0.0.1:1234")),  # 0: unknown number of local ranks
        (
            {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:99", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"},
            (1, 3, 1, 0, "[fd00::1]:99"),
        ),
        (SLURM, (3, 4, 1, 2, f"gpu07:{discover(SLURM).master_port}")),
        (SLURM | {"MASTER_PORT": "4000", "MASTER_ADDR": "x"}, (3, 4, 1, 2, "x:4000")),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, (0, 1, 0, 1, "127.0.0.1:29500")),  # sbatch
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
            | {"MASTER_PORT": "7"},
            (1, 2, 1, 2, "127.0.0.1:7"),
        ),
        (
            {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job"},
            (1, 2, 0, 1, "job-0.job:29500"),
        ),
        # torchrun holds its port, so we meet one above
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}, (0, 2, 0, 2, "127.0.0.1:29500")),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            (0, 2, 0, 2, "127.0.0.1:29501"),
        ),
    ],
)
def test_the_place_that_each_source_gives(env, place):
    found = discover(env)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.address) == place


def test_the_other_variables_reach_the_topology():
    found = [(t.timeout_ms, t.backend, t.restart_count) for t in (discover({}), discover(EVERYTHING))]
    assert found == [(30_000, "auto", 0), (5000, "gloo", 3)]


@pytest.mark.parametrize(
    ("env", "host"),
    [
        *(
            (SLURM | {"SLURM_STEP_NODELIST": nodes}, host)
            for nodes, host in [
                ("n-1", "127.0.0.1"),  # there is no other
                ("n[08-10,2],m", "n08"),
                ("n[2,7]", "n2"),
                ("m,n[1-2]", "m"),
                ("r[1-2]n[3-4]", "r1n3"),
            ]
        ),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "a"}, "127.0.0.1"),
        (TWO_HOSTS | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.96.0.1,10.148.0.1:34911"}, "10.96.0.1"),  # 4
        (TWO_HOSTS | {"PMIX_NAMESPACE": "prterun-node-7-1234@1"}, "node-7"),  # 5
        (TWO_HOSTS | {"MASTER_ADDR": "mine"}, "mine"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "PMI_PORT": "head:4711"}, "head"),
    ],
)
def test_rank_0_s_host_is_found(env, host):
    assert discover(env).master_addr == host


def test_a_job_has_a_port_of_its_own():
    here = [SLURM, SLURM | {"SLURM_PROCID": "0"}, SLURM | {"SLURM_STEP_ID": "1"}]
    mpi = [TWO_HOSTS | {"PMIX_NAMESPACE": f"prterun-n-{job}@1"} for job in (1, 2)]
    one, same, other, first, second = (discover(env).master_port for env in here + mpi)
    assert one == same
    assert len({one, other, first, second}) == 4


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, "RANK=0 .*WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 .*RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 .*RANK .*WORLD_SIZE"),
        ({"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID=0 .*JAX_COORDINATOR_ADDRESS"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0 .*PMI_SIZE"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, "-genv MASTER_ADDR"),
        (TWO_HOSTS, "-x MASTER_ADDR"),
        ({"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 .*WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        ({"DISTRIBUTED_TIMEOUT_MS": "0"}, "DISTRIBUTED_TIMEOUT_MS='0'"),
        ({"DISTRIBUTED_BACKEND": "mpi"}, "DISTRIBUTED_BACKEND='mpi'"),
        (
            {"JAX_COORDINATOR_ADDRESS": "host", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "JAX_COORDINATOR_ADDRESS='host' .*HOST:PORT",
        ),
        (SLURM | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
        (
            SLURM | {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0, WORLD_SIZE=2 but Slurm says SLURM_PROCID=3",
        ),
    ],
)
def test_bad_environments_name_the_variable_and_hint(env, named):
    with pytest.raises(ConfigError, match=rf"^(?=.*HINT: ).*{named}"):
        discover(env)


def test_sources_that_agree_are_all_listed():
    both = claims(SLURM | {"RANK": "3", "WORLD_SIZE": "4"})
    assert [t.source for t in both] == ["RANK, WORLD_SIZE", "Slurm"]


def test_a_launcher_inside_an_engine_wins_without_a_comparison():
    inner = {"RANK": "0", "WORLD_SIZE": "2", "CYXJAX_RUN_ID": "a", "CYXJAX_HOSTED": "h:7"}
    topology = discover(SLURM | inner)
    assert (topology.rank, topology.source, topology.hosted) == (0, "cyxjax.launch", True)
    assert (topology.master_addr, topology.master_port) == ("h", 7)


def test_the_token_is_never_printed():
    assert "s3cret" not in repr(Topology(token="s3cret"))
