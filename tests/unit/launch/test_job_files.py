"""Job files: content, refusals, and that the shipped examples match the output of the generator."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from cyxjax.errors import EXIT_CONFIG, EXIT_INFRASTRUCTURE
from cyxjax.launch import job_files
from cyxjax.launch.clusters import discover
from cyxjax.launch.job_files import (
    JobSpec,
    kubernetes_environment,
    kubernetes_manifest,
    slurm_script,
)
from cyxjax.launch.options import parse

ROOT = Path(__file__).parents[3]
SPEC = JobSpec(
    ["python", "train.py", "--note", "a b; $(reboot)"],
    name="run-7",
    nodes=2,
    processes_per_node=4,
    image="i:1",
)
EXAMPLE = ["--name", "digits", "--nodes", "2", "--processes-per-node", "4"]
EXAMPLE += ["--cpus-per-process", "4", "--memory-gib", "32"]
PROGRAM = ["--", "python", "-m", "cyxjax.train", "--config", "configs/digits.yaml"]


def test_gpus_are_asked_for_and_nothing_in_a_command_is_the_shell_s():
    spec = replace(SPEC, gpus_per_node=8, partition="a100")
    text = slurm_script(spec)
    assert "#SBATCH --partition=a100\n#SBATCH --gpus-per-node=8\n" in text
    assert shlex.split(text.rstrip().splitlines()[-1]) == SPEC.command
    _, job = json.loads(kubernetes_manifest(spec))["items"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-4:] == SPEC.command
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_ranks_have_the_time_to_save_that_the_engine_gives():
    _, job = json.loads(kubernetes_manifest(SPEC))["items"]
    pod, script = job["spec"]["template"]["spec"], slurm_script(SPEC)
    words = script.rpartition("cyxjax.launch")[2].replace("\\\n", "")
    for given_s, command in [
        (pod["terminationGracePeriodSeconds"], pod["containers"][0]["command"][3:]),
        (int(script.partition("--signal=TERM@")[2].split()[0]), shlex.split(words)),
        (int(script.partition("--wait=")[2].split()[0]), shlex.split(words)),  # for the other launchers
    ]:
        grace_s = parse(command, kubernetes_environment(SPEC) | {"JOB_COMPLETION_INDEX": "0"}).grace_s
        assert given_s - 20 < grace_s < given_s


def test_a_pods_environment_places_it_with_and_without_our_launcher():
    env = kubernetes_environment(SPEC) | {"JOB_COMPLETION_INDEX": "1"}
    assert (discover(env).rank, discover(env).world_size) == (1, 2)
    place = parse(["--nproc-per-node", "4", __file__], env).place
    assert (place.base_rank, place.world_size, place.master_addr) == (4, 8, "run-7-0.run-7")


@pytest.mark.parametrize(
    ("engine", "flags", "path"),
    [
        ("slurm", [], "scripts/slurm/digits.sbatch"),
        ("k8s", ["--image", "registry.example/cyxjax:1"], "scripts/kubernetes/digits.json"),
    ],
)
def test_the_shipped_examples_are_what_the_command_writes(engine, flags, path, printed):
    assert printed(job_files.main, engine, *EXAMPLE, *flags, *PROGRAM) == (ROOT / path).read_text()


@pytest.mark.parametrize(
    "argv",
    [["slurm"], ["lsf", "--", "x"], ["k8s", "--", "x"], ["slurm", "--output", "none/x", "--", "x"]]
    + [["k8s", "--image", "x", flag, "--", "x"] for flag in ("--check", "--submit")],
)
def test_a_bad_command_line_is_one_line(argv, capsys):
    assert job_files.main(argv) == EXIT_CONFIG
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "HINT: " in output


def test_a_script_is_checked_and_queued_by_slurm_or_its_refusal_is_shown(cwd, monkeypatch, capsys, printed):
    sbatch = cwd / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        '#!/bin/sh\n[ -e refuse ] && { echo "no such partition" >&2; exit 1; }\necho "sbatch $*"\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    output = printed(job_files.main, "slurm", "--name", "mine", "--submit", *PROGRAM).splitlines()
    assert output == ["wrote mine.sbatch", "sbatch --test-only mine.sbatch", "sbatch mine.sbatch"]
    (cwd / "refuse").touch()
    assert job_files.main(["slurm", "--check", "--output", "x.sbatch", *PROGRAM]) == EXIT_INFRASTRUCTURE
    assert "sbatch refused x.sbatch: no such partition. HINT" in capsys.readouterr().err
