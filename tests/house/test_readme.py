"""The code in the documents runs: blocks that begin with ```python test, page by page, in an empty folder."""

import pytest

from tests.support.places import ROOT
from tests.support.programs import run

MARK = "```python test"


def marked_code(text: str) -> str:
    """The marked blocks of `text` as one program with the same line numbers; other lines are blank."""
    program, inside = [], False
    for line in text.splitlines():
        if inside and line.startswith("```"):
            inside = False
        program.append(line if inside else "")
        if line.strip() == MARK:
            inside = True
    return "\n".join(program) + "\n"


def test_marked_blocks_are_found_at_their_lines():
    text = f"words\n{MARK}\nx = 1\n```\n```python\nnot run\n```\n{MARK}\nassert x == 1\n```\n"
    assert marked_code(text) == "\n\nx = 1\n\n\n\n\n\nassert x == 1\n\n"


PAGES = {
    path.relative_to(ROOT).as_posix(): program
    for path in [ROOT / "README.md", *sorted((ROOT / ".github" / "docs").rglob("*.md"))]
    if (program := marked_code(path.read_text(encoding="utf-8"))).strip()
}


def test_the_readme_and_most_guides_have_code_that_runs():
    assert "README.md" in PAGES
    assert len(PAGES) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path):
    (tmp_path / "page.py").write_text(PAGES[page])
    done = run("page.py", cwd=tmp_path, JAX_NUM_CPU_DEVICES=2, NPROC=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
