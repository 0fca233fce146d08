"""The notebooks run in a kernel, in an empty folder; each is stored as .ipynb with outputs, and as .py."""

import os
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def tool(name):
    """A module: to load these takes long, and most processes of the tests need none of them."""
    return pytest.importorskip(name, reason="the notebooks' tools are missing: make setup")


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def kept(outputs: list) -> list:
    """`outputs` as a page should show them: lines in one block, without erased live lines."""
    shown: list = []
    for output in outputs:
        if output.output_type == "stream" and shown and shown[-1].get("name") == output.name:
            shown[-1].text += output.text
        elif any(output.get("data", {"text": "shown"}).values()):
            shown.append(output)
    return shown


def test_each_notebook_has_its_pair():
    folder = NOTEBOOKS[0].parent
    assert [path.stem for path in NOTEBOOKS] == sorted(path.stem for path in folder.glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_its_pair_says_and_is_kept_with_short_outputs(path):
    notebook, jupytext = tool("nbformat").read(path, as_version=4), tool("jupytext")
    # After an edit of either: jupytext --sync notebooks/NAME.py
    assert cells(notebook) == cells(jupytext.read(path.with_suffix(".py"), fmt="py:percent"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = {out.output_type for cell in code for out in cell.outputs}
    assert "stream" in kinds
    assert "error" not in kinds
    assert all(len(kept(cell.outputs)) == len(cell.outputs) for cell in code)
    assert path.stat().st_size < 250_000
    assert str(Path.home()) not in path.read_text()


@pytest.mark.slow
@pytest.mark.timeout(420)  # on a busy machine a start alone takes a while
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel(path, tmp_path):
    """With CYXJAX_WRITE_NOTEBOOKS=1 (make notebooks) the outputs are written into the file."""
    nbformat, nbclient = tool("nbformat"), tool("nbclient")
    notebook = nbformat.read(path, as_version=4)
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    kernel = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    kernel.execute(env=env)  # raises the error of a cell, with its traceback
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = [out.text for cell in code for out in cell.outputs if "text" in out]
    assert re.match(r"[248] replicas in 1 process, gloo\n", printed[0])
    if os.environ.get("CYXJAX_WRITE_NOTEBOOKS"):
        for cell in notebook.cells:
            cell.metadata.clear()  # when each cell ran
        for cell in code:
            cell.outputs = kept(cell.outputs)
        nbformat.write(notebook, path)
