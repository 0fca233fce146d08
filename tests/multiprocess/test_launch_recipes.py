"""The recipes for SkyPilot, Kubeflow and Ray are well formed, and the ranks that they start form a group.

The tests do not run the engines: they set the variables that an engine would set.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from cyxjax.launch.clusters import discover
from tests.support import forked
from tests.support.engines import environment
from tests.support.launching import RANK
from tests.support.places import module_of
from tests.support.programs import ROOT, free_port

pytestmark = pytest.mark.multiprocess
SCRIPTS = ROOT / "scripts"
PROGRAM = "-m cyxjax.train --config configs/digits.yaml"
# SkyPilot's task fields that a recipe may use. A misspelt field is refused by `sky launch`.
SKY_TASK = {"name", "num_nodes", "resources", "workdir", "envs", "secrets", "setup", "run", "file_mounts"}
SKY_RESOURCES = {"cpus", "memory", "accelerators", "infra", "use_spot", "disk_size", "image_id", "ports"}


def run_all(commands, fresh=()) -> list[str]:
    """The output of each command; all run concurrently, and all must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ranks = [(words, environment(KIND="light", PATH=path, **env)) for words, env in commands]
    ended = forked.run_all(ranks, 90, ROOT, fresh)
    assert all(done.returncode == 0 for done in ended), ended
    return [done.stdout for done in ended]


def test_skypilot_the_task_is_well_formed_and_its_nodes_meet():
    task = yaml.safe_load((SCRIPTS / "skypilot" / "digits.yaml").read_text())
    assert set(task) <= SKY_TASK
    assert set(task["resources"]) <= SKY_RESOURCES
    assert task["secrets"] == {"CYXJAX_TOKEN": None}  # given on the command line, never in the file
    assert PROGRAM in task["run"]
    script = task["run"].replace(PROGRAM, str(RANK)).replace("29500", str(free_port()))
    script = script.replace("--nproc-per-node 4", "--nproc-per-node 1")
    sky = task["envs"] | {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-1",
        "CYXJAX_TOKEN": "t" * 64,
    }
    nodes = [(["-ec", script], sky | {"SKYPILOT_NODE_RANK": str(k)}) for k in range(2)]
    assert all("finished 3 steps, start 0, total 2" in text for text in run_all(nodes, ("bash",)))


def test_kubeflow_master_and_worker_are_alike_named_as_the_operator_wants_and_given_places():
    job = json.loads((SCRIPTS / "kubeflow" / "digits.json").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    counts = {name: (role["replicas"], role["restartPolicy"]) for name, role in roles.items()}
    assert counts == {"Master": (1, "OnFailure"), "Worker": (1, "OnFailure")}
    master, worker = (role["template"] for role in roles.values())
    assert master == worker  # different pods would disagree on versions or configuration
    (container,) = worker["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator sets variables in this container only
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 29500}]
    assert " ".join(container["command"]) == f"python {PROGRAM}"
    # The operator adds MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK: the names that torch uses.
    variables = {entry["name"]: entry.get("value", "t" * 64) for entry in container["env"]}
    place = discover(variables | {"MASTER_ADDR": "a", "MASTER_PORT": "7", "WORLD_SIZE": "2", "RANK": "1"})
    assert (place.rank, place.world_size, place.address, place.token) == (1, 2, "a:7", "t" * 64)
    assert (place.run_id, place.timeout_ms) == ("digits", 300_000)


# A rank without our launcher: rank 0 hosts the rendezvous.
RANK_OF_ITS_OWN = """
import jax, os
from cyxjax.distributed import process_group
process_group.init()
assert jax.process_count() == 2
print('finished 3 steps', flush=True)
process_group.finalize()
"""


def test_ray_the_tasks_meet():
    recipe = module_of(SCRIPTS / "ray" / "digits.py")
    assert " ".join(recipe.COMMAND[1:]) == PROGRAM
    _, port = recipe.meeting_place()
    ranks = [recipe.rank_environment(k, recipe.RANKS, "127.0.0.1", port, "t" * 64) for k in range(2)]
    outputs = run_all([(["-c", RANK_OF_ITS_OWN], env) for env in ranks])
    assert all("finished 3 steps" in text for text in outputs)
