"""Which place each source gives a process, and what the errors name."""

import pytest

from cyxjax.errors import ConfigError
from cyxjax.launch.clusters import claims, discover
from cyxjax.launch.topology import Topology

OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
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


def test_nothing_set_is_a_group_of_one():
    topology = discover({})
    assert (topology.rank, topology.world_size, topology.local_rank) == (0, 1, 0)
    assert (topology.address, topology.timeout_ms, topology.backend) == ("127.0.0.1:29500", 30_000, "auto")


def test_torch_names_and_their_defaults():
    topology = discover({"RANK": "2", "WORLD_SIZE": "4"})
    assert (topology.rank, topology.world_size) == (2, 4)
    assert topology.local_rank == 2  # unset: same as RANK
    assert topology.local_world_size == 4  # they meet on loopback, so all are here
    assert topology.address == "127.0.0.1:29500"


def test_every_variable_reaches_the_topology():
    topology = discover(
        {
            "RANK": "2",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "1234",
            "DISTRIBUTED_BACKEND": "CPU",
            "DISTRIBUTED_TIMEOUT_MS": "5000",
            "RESTART_COUNT": "3",
        }
    )
    assert (topology.local_rank, topology.local_world_size) == (0, 0)  # 0: nobody said how many are here
    assert (topology.address, topology.backend) == ("10.0.0.1:1234", "gloo")
    assert (topology.timeout_ms, topology.restart_count) == (5000, 3)


def test_jax_names():
    env = {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:99", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"}
    topology = discover(env)
    assert (topology.rank, topology.world_size, topology.master_addr) == (1, 3, "fd00::1")
    assert topology.address == "[fd00::1]:99"


def test_torchrun_holds_its_port_so_we_meet_one_above():
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    assert discover(env).master_port == 29500
    assert discover(env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).master_port == 29501


def test_slurm_step():
    topology = discover(SLURM)
    assert (topology.rank, topology.world_size, topology.local_rank) == (3, 4, 1)
    assert (topology.local_world_size, topology.master_addr) == (2, "gpu07")
    assert topology.master_port == discover(SLURM | {"SLURM_PROCID": "0"}).master_port
    assert topology.master_port != discover(SLURM | {"SLURM_STEP_ID": "1"}).master_port
    assert discover(SLURM | {"MASTER_PORT": "4000", "MASTER_ADDR": "x"}).address == "x:4000"


def test_slurm_batch_script_is_not_a_rank():
    env = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert discover(env).world_size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n-1", "127.0.0.1"),  # there is no other
        ("n[08-10,2],m", "n08"),
        ("n[2,7]", "n2"),
        ("m,n[1-2]", "m"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_slurm_node_lists(nodes, first):
    assert discover(SLURM | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_open_mpi_on_one_host():
    topology = discover(OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "a"})
    assert (topology.rank, topology.local_rank, topology.master_addr) == (3, 1, "127.0.0.1")


def test_open_mpi_4_and_5_on_several_hosts():
    here = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    four = discover(here | {"OMPI_MCA_orte_hnp_uri": "153157.0;tcp://10.96.0.1,10.148.0.1:34911"})
    five = discover(here | {"PMIX_NAMESPACE": "prterun-node-7-1234@1"})
    assert (four.master_addr, five.master_addr) == ("10.96.0.1", "node-7")
    with pytest.raises(ConfigError, match="-x MASTER_ADDR"):
        discover(here)


def test_pmi():
    topology = discover({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (topology.rank, topology.local_rank, topology.master_addr) == (1, 1, "127.0.0.1")
    far = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
    assert discover(far | {"PMI_PORT": "head:4711"}).master_addr == "head"
    with pytest.raises(ConfigError, match="-genv MASTER_ADDR"):
        discover(far)


def test_kubernetes_index_is_the_rank():
    topology = discover({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job"})
    assert (topology.rank, topology.world_size, topology.local_rank) == (1, 2, 0)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, "RANK=0 .*WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 .*RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 .*RANK .*WORLD_SIZE"),
        ({"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID=0 .*JAX_COORDINATOR_ADDRESS"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0 .*PMI_SIZE"),
        ({"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK='two'"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK=''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 .*WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "tcp://x"}, "MASTER_ADDR='tcp://x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR=''"),
        ({"DISTRIBUTED_TIMEOUT_MS": "0"}, "DISTRIBUTED_TIMEOUT_MS='0'"),
        ({"DISTRIBUTED_BACKEND": "mpi"}, "DISTRIBUTED_BACKEND='mpi'"),
        (
            {"JAX_COORDINATOR_ADDRESS": "host", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "JAX_COORDINATOR_ADDRESS='host' .*HOST:PORT",
        ),
        (SLURM | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
    ],
)
def test_bad_environments_name_the_variable_and_hint(env, named):
    with pytest.raises(ConfigError, match=named) as caught:
        discover(env)
    assert "HINT: " in str(caught.value)


def test_world_size_one_alone_is_whole():
    assert discover({"WORLD_SIZE": "1"}).world_size == 1


def test_sources_that_disagree_are_refused_by_name():
    with pytest.raises(ConfigError, match="RANK=0, WORLD_SIZE=2 but Slurm says SLURM_PROCID=3"):
        discover(SLURM | {"RANK": "0", "WORLD_SIZE": "2"})


def test_sources_that_agree_are_all_listed():
    both = claims(SLURM | {"RANK": "3", "WORLD_SIZE": "4"})
    assert [t.source for t in both] == ["RANK, WORLD_SIZE", "Slurm"]


def test_a_launcher_inside_an_engine_wins_without_a_comparison():
    inner = {"RANK": "0", "WORLD_SIZE": "2", "CYXJAX_RUN_ID": "a", "CYXJAX_HOSTED": "1"}
    topology = discover(SLURM | inner)
    assert (topology.rank, topology.source, topology.hosted) == (0, "cyxjax.launch", True)


def test_the_token_is_never_printed():
    assert "s3cret" not in repr(Topology(token="s3cret"))
