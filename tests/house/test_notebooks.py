"""The notebooks run, top to bottom, in an empty folder, and are kept without outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code_cells(path))


@pytest.mark.slow
@pytest.mark.timeout(420)  # on a busy machine a start alone takes a while
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    program = tmp_path / f"{path.stem}.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in code_cells(path)))
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, program.name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"[28] replicas in 1 process, gloo\n", done.stdout)
