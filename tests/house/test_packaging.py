"""The lock, the Makefile and the experiment files fit the package they belong to."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import cyxjax
from cyxjax.config.load import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def locked() -> list[str]:
    """One text per package of the lock: `name==version ; marker --hash=...`."""
    joined = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def test_every_locked_package_is_pinned_and_hashed():
    assert len(locked()) > 20
    for line in locked():
        assert re.match(r"[a-z0-9-]+==\S+ ", line), line[:80]
        assert "--hash=sha256:" in line, line[:80]


def test_the_lock_holds_no_address():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?://|file:|--(extra-)?index-url|--find-links| @ ", text)


def test_every_direct_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[=\s]", line)[0] for line in locked()}
    for requirement in wanted:
        name = re.split(r"[\[<>=\s]", requirement)[0].lower()
        assert name in names or name == "cyxjax", f"{requirement}: run `make lock`"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_experiment_files_load_and_say_what_they_are(path):
    config = load_config(["--config", str(path)])
    assert config.run_dir == f"runs/{path.stem}"
    head = path.read_text().split("\n\n")[0]
    for word in ("# result:", "# time:", "# hardware:", "# command:"):
        assert word in head, f"{path.name} does not say {word}"


def test_make_and_ci_are_valid(tmp_path):
    shown = subprocess.run(
        ["make", "-n", "train", "ARGS=--epochs 1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m cyxjax.train --config configs/digits.yaml --epochs 1" in shown.stdout
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0


def test_make_lists_each_target_it_has():
    text = (ROOT / "Makefile").read_text()
    shown = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    wanted = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert re.findall(r"^  make (\w+) +\w", shown, re.MULTILINE) == wanted


def test_the_hooks_before_a_commit_fetch_nothing():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["language"] for hook in hooks["repos"][0]["hooks"]} == {"system"}


def test_the_wheel_holds_the_mark_of_a_typed_package(tmp_path):
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob(f"cyxjax-{cyxjax.__version__}-*.whl")
    names = ZipFile(wheel).namelist()
    assert "cyxjax/py.typed" in names
    assert not [name for name in names if not name.startswith("cyxjax")]


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "cyxjax.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"cyxjax \d+\.\d+\.\d+\S*", done.stdout.strip())
