"""Editor support: every lazy name is also imported for type checkers, and a user's typo is found."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.places import PACKAGE
from tests.support.programs import fresh

LAZY = ["cyxjax", "cyxjax.distributed", "cyxjax.models"]

USERS_FILE = """\
import cyxjax as cx

data = cx.load_dataset("digits")
config = cx.distributed.DistributedTrainingConfig(epochs=2, batch_sise=32)
config.epocs = 3
trainer = cx.distributed.DistributedTrainer(cx.get_model("cnn")(), cx.CrossEntropyLoss(), cx.AdamOptimizer())
history = trainer.fit(data.train, data.val, config)
trainer.evalute(data.test)
print(history.val_acuracies)
cx.DataLoder
"""
# Checking other packages takes half a minute, and the typos are in our names.
MYPY = """\
[mypy]
[mypy-jax.*,flax.*,optax.*,orbax.*,numpy.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
TYPOS = {4: "batch_sise", 5: "epocs", 8: "evalute", 9: "val_acuracies", 10: "DataLoder"}  # line -> word


@pytest.mark.parametrize("module", LAZY)
def test_type_checkers_see_each_lazy_name(module):
    loaded = import_module(module)
    (block,) = (
        node
        for node in ast.parse(Path(loaded.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in found)  # exported: `name as name`
    assert {alias.name for alias in found} == set(loaded.__all__)


def test_no_lazy_module_is_left_out():
    files = [path for path in PACKAGE.rglob("__init__.py") if "__getattr__" in path.read_text()]
    assert {Path(import_module(module).__file__) for module in LAZY} == set(files)


@pytest.mark.slow
def test_a_user_s_typos_are_found(tmp_path):
    (tmp_path / "train.py").write_text(USERS_FILE)
    (tmp_path / "mypy.ini").write_text(MYPY)
    done = fresh("-m", "mypy", "train.py", cwd=tmp_path)
    lines = [line.split(":", 2) for line in done.stdout.splitlines() if line.startswith("train.py:")]
    found = {int(number): message for _, number, message in lines}
    assert found.keys() == TYPOS.keys(), done.stdout + done.stderr
    assert all(word in found[line] for line, word in TYPOS.items()), done.stdout
