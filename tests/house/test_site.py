"""The documentation site: each public name has a reference entry, each page a menu entry."""

import re
from pathlib import Path

import pytest
import yaml

import cyxjax as cx
from cyxjax.cli import main
from cyxjax.config.experiment import TrainConfig
from tests.support.places import module_of

SITE = Path(__file__).parents[2] / ".github"
DOCS = SITE / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
TEXT = "\n".join(PAGES.values())
CONFIG = yaml.safe_load((SITE / "mkdocs.yml").read_text())
REFERENCES = re.findall(r"^::: cyxjax\.(\S+)$", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def hooks():
    """The module that generates parts of the pages."""
    return module_of(DOCS / "site_hooks.py")


def in_the_menu(entry) -> list[str]:
    """The pages of a menu section, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in in_the_menu(part)]


def test_every_public_name_has_its_reference_once():
    names = {name for name in cx.__all__ if not hasattr(getattr(cx, name), "__path__")}
    names -= {"amp", "errors", "testing"}  # single-file modules
    group = [getattr(cx.distributed, name) for name in cx.distributed.__all__]
    names = {name for name in names if getattr(cx, name) not in group}  # aliases of the same objects
    wanted = names | {f"distributed.{name}" for name in cx.distributed.__all__}
    assert wanted - set(REFERENCES) == set()
    assert len(REFERENCES) == len(set(REFERENCES))


def test_the_menu_holds_every_page_once():
    assert sorted(in_the_menu(CONFIG["nav"])) == sorted(PAGES)


def test_the_made_parts_name_every_key_and_command(hooks):
    text = hooks.with_made_parts(PAGES["configuration.md"])
    for name in main.ROWS:
        assert f"`cyxjax {name}`" in text
    for name, value in TrainConfig():
        parts = getattr(type(value), "model_fields", ())  # of a section
        for key in [f"{name}.{part}" for part in parts] or [name]:
            assert f"| `{key}` |" in text, key


def test_each_mark_has_a_maker_and_each_maker_a_mark(hooks):
    marks = re.findall(r"^<!-- made: (\w+) -->$", TEXT, re.MULTILINE)
    assert sorted(marks) == sorted(hooks.MADE)


def test_the_site_loads_nothing_from_elsewhere():
    assert CONFIG["theme"]["font"] is False
    assert not re.search(r"(src|href)=.?https?:", TEXT)


def test_code_that_tests_run_is_a_fence_to_mkdocs(hooks):
    # it ignores a fence with a second word: the block and the following headings would be shown as text
    assert "```python test" in TEXT
    assert "```python test" not in "".join(hooks.on_page_markdown(page) for page in PAGES.values())
