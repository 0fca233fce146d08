"""The recipes for SkyPilot, Kubeflow and Ray: what they say is well formed, and what they start does meet.

The engines themselves are not here: their part, the variables they set, is played by the tests.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cyxjax.launch.clusters import discover
from tests.support.engines import free_port
from tests.support.launching import RANK

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PROGRAM = "-m cyxjax.train --config configs/digits.yaml"
# SkyPilot's task fields that a recipe may use: name -> type. A misspelt field is refused by `sky launch`.
SKY_TASK = {"name": str, "num_nodes": int, "resources": dict, "workdir": str, "envs": dict, "secrets": dict}
SKY_TASK |= {"setup": str, "run": str, "file_mounts": dict}
SKY_RESOURCES = {"cpus", "memory", "accelerators", "infra", "use_spot", "disk_size", "image_id", "ports"}


def run_all(commands: list[tuple[list[str], dict[str, str]]]) -> list[str]:
    """What each command printed; all run at once, and all must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    base = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"PATH": path}
    base |= {"JAX_PLATFORMS": "cpu", "KIND": "light", "STEPS": "3"}
    started = [
        subprocess.Popen(words, env=base | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words, env in commands
    ]
    try:
        said = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in started] == [0] * len(started), said
    return said


def test_skypilot_the_task_is_well_formed():
    task = yaml.safe_load((SCRIPTS / "skypilot" / "digits.yaml").read_text())
    assert {"name", "num_nodes", "resources", "run"} <= set(task) <= set(SKY_TASK)
    assert all(isinstance(value, SKY_TASK[name]) for name, value in task.items())
    assert set(task["resources"]) <= SKY_RESOURCES
    assert all(value is None or isinstance(value, str) for value in (task["envs"] | task["secrets"]).values())
    assert task["secrets"] == {"CYXJAX_TOKEN": None}  # given on the command line, never in the file
    assert PROGRAM in task["run"]


def test_skypilot_the_nodes_meet():
    task = yaml.safe_load((SCRIPTS / "skypilot" / "digits.yaml").read_text())
    script = task["run"].replace(PROGRAM, str(RANK)).replace("29500", str(free_port()))
    script = script.replace("--nproc-per-node 4", "--nproc-per-node 1")
    sky = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    sky |= task["envs"] | {"CYXJAX_TOKEN": "t" * 64}
    said = run_all([(["bash", "-ec", script], sky | {"SKYPILOT_NODE_RANK": str(k)}) for k in range(2)])
    assert all("finished 3 steps, start 0, total 2" in text for text in said)


def kubeflow_roles() -> dict[str, dict]:
    job = json.loads((SCRIPTS / "kubeflow" / "digits.json").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    return job["spec"]["pytorchReplicaSpecs"]


def test_kubeflow_master_and_worker_are_alike_and_named_as_the_operator_wants():
    roles = kubeflow_roles()
    assert set(roles) == {"Master", "Worker"}
    assert roles["Master"]["replicas"] == 1
    templates = [role["template"] for role in roles.values()]
    assert templates[0] == templates[1]  # ranks that differ would disagree on versions or configuration
    (container,) = templates[0]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator fills in this container only
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 29500}]
    assert " ".join(container["command"]) == f"python {PROGRAM}"
    assert {role["restartPolicy"] for role in roles.values()} == {"OnFailure"}


def test_kubeflow_the_pods_are_given_places():
    """The operator adds MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK: the words of torch."""
    container = kubeflow_roles()["Worker"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry.get("value", "t" * 64) for entry in container["env"]}
    place = discover(given | {"MASTER_ADDR": "a", "MASTER_PORT": "7", "WORLD_SIZE": "2", "RANK": "1"})
    assert (place.rank, place.world_size, place.address, place.token) == (1, 2, "a:7", "t" * 64)
    assert (place.run_id, place.timeout_ms) == ("digits", 300_000)


# A rank without our launcher: rank 0 holds the meeting place.
RANK_OF_ITS_OWN = """
import jax, os
from cyxjax.distributed import process_group
process_group.init()
assert jax.process_count() == 2
print('finished 3 steps', flush=True)
process_group.finalize()
"""


def test_ray_the_tasks_meet():
    spec = importlib.util.spec_from_file_location("ray_digits", SCRIPTS / "ray" / "digits.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    assert " ".join(recipe.COMMAND[1:]) == PROGRAM
    _, port = recipe.meeting_place()
    ranks = [recipe.rank_environment(k, recipe.RANKS, "127.0.0.1", port, "t" * 64) for k in range(2)]
    said = run_all([([sys.executable, "-c", RANK_OF_ITS_OWN], env) for env in ranks])
    assert all("finished 3 steps" in text for text in said)
