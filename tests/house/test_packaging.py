"""The lock files, the Makefile and the experiment files match the package."""

import re
import subprocess
import sys
import tomllib
from zipfile import ZipFile

import pytest
import yaml

import cyxjax
from cyxjax.config.load import load_config
from tests.support.places import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


LOCKS = {"requirements.lock": "digits", "requirements-dev.lock": "dev"}  # -> the extra that it locks
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(lock: str) -> list[str]:
    """One text per package of a lock: `name==version ; marker --hash=...`."""
    joined = (ROOT / lock).read_text().replace("\\\n", " ")
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def versions(lock: str) -> set[str]:
    """`name==version` of each package of a lock, without its extras."""
    return {re.sub(r"\[.*?\]", "", line).split()[0] for line in locked(lock)}


def requirements(*extras: str) -> set[str]:
    """The names of all direct dependencies and of those of `extras`, including nested extras."""
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *PYPROJECT["dependency-groups"]["build"]]
    wanted += [one for extra in extras for one in project["optional-dependencies"][extra]]
    names = {re.split(r"[\[<>=\s]", one)[0].lower() for one in wanted if not one.startswith("cyxjax[")}
    inner = [
        re.fullmatch(r"cyxjax\[(.*)\]", one)[1].split(",") for one in wanted if one.startswith("cyxjax[")
    ]
    return names.union(*(requirements(*those) for those in inner))


@pytest.mark.parametrize(("lock", "extra"), LOCKS.items())
def test_every_direct_dependency_is_locked_pinned_and_hashed_without_an_address(lock, extra):
    assert len(locked(lock)) > 20
    for line in locked(lock):
        assert re.match(r"[a-z0-9-]+(\[[a-z0-9, -]+\])?==\S+ ", line), line[:80]
        assert "--hash=sha256:" in line, line[:80]
    text = (ROOT / lock).read_text()
    assert not re.search(r"https?://|file:|--(extra-)?index-url|--find-links| @ ", text)
    missing = requirements(extra) - {version.partition("==")[0] for version in versions(lock)}
    assert not missing, "run `make lock`"


def test_the_small_lock_is_a_part_of_the_large_one():
    small, large = versions("requirements.lock"), versions("requirements-dev.lock")
    assert small < large
    assert len(small) < len(large) / 2


def test_all_holds_every_extra_but_accelerators_and_tools():
    extras = PYPROJECT["project"]["optional-dependencies"]
    (inner,) = extras["all"]
    named = re.fullmatch(r"cyxjax\[(.*)\]", inner)[1].split(",")
    assert set(named) == set(extras) - {"all", "dev", "docs", "gpu", "cuda12", "tpu"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_experiment_files_load_and_say_what_they_are(path):
    config = load_config(["--config", str(path)])
    assert config.run_dir == f"runs/{path.stem}"
    head = path.read_text().split("\n\n")[0]
    for word in ("# result:", "# time:", "# hardware:", "# command:"):
        assert word in head, f"{path.name} does not say {word}"


def make(*words: str) -> str:
    """What `make WORDS` prints."""
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_and_ci_are_valid():
    shown = make("-n", "train", "ARGS=--epochs 1")
    assert "-m cyxjax.train --config configs/digits.yaml --epochs 1" in shown
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0


@pytest.mark.parametrize(("target", "locks"), [("train", 1), ("test", 2)])
def test_running_needs_the_small_lock_and_testing_both(target, locks, tmp_path):
    shown = make("-n", target, f"VENV={tmp_path}/venv")
    assert len(re.findall(r"-r requirements\S*\.lock", shown)) == locks


def test_make_lists_each_target_it_has():
    text = (ROOT / "Makefile").read_text()
    wanted = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert re.findall(r"^  make (\w+) +\w", make("-s", "help"), re.MULTILINE) == wanted


def test_the_hooks_before_a_commit_fetch_nothing():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}


def test_the_wheel_holds_every_module_and_the_mark_of_a_typed_package(tmp_path):
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob(f"cyxjax-{cyxjax.__version__}-*.whl")
    names = ZipFile(wheel).namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "cyxjax").rglob("*.py")}
    assert not modules.difference(names)
    assert "cyxjax/py.typed" in names
    assert not [name for name in names if not name.startswith("cyxjax")]


def test_the_workflow_runs_ci_on_each_python_that_the_metadata_names():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    job, oldest = jobs["all"], jobs["oldest"]
    prefix = "Programming Language :: Python :: 3."
    named = [one.rpartition(" ")[2] for one in PYPROJECT["project"]["classifiers"] if one.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == named
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert "make oldest" in [step.get("run") for step in oldest["steps"]]
    version = next(step["with"] for step in oldest["steps"] if "with" in step)["python-version"]
    assert version == named[0]


def test_the_image_is_made_of_files_and_extras_that_there_are():
    text = (ROOT / ".github/Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    extras = {one for line in re.findall(r"EXTRAS=([\w,]+)", text) for one in line.split(",")}
    assert extras <= set(PYPROJECT["project"]["optional-dependencies"])
