"""Every configuration key is read by some code: no documented key is without effect."""

import ast
from pathlib import Path

from pydantic import BaseModel

import cyxjax
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train import settings
from tests.support.places import trees

PACKAGE = Path(cyxjax.__file__).parent
ONLY_CHECKED = {  # key -> its effect although nothing outside config/ reads it
    "save_on_master_only": "false is refused",
    "fast_dev_run": "config/load.py turns it into other keys",
}


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """`model` and its sections."""
    sections = [f.annotation for f in model.model_fields.values()]
    return [model, *(s for s in sections if isinstance(s, type) and issubclass(s, BaseModel))]


def names_read(folder: Path) -> set[str]:
    """Attributes and string constants (`getattr(config, name)`, `values["name"]`) read outside config/."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        if folder / "config" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def keys() -> set[str]:
    every = [*models(TrainConfig), DistributedTrainingConfig]
    return {name for model in every for name in model.model_fields}


def test_every_key_is_read_outside_the_room_that_defines_it():
    # Properties of the models read keys for others: checkpoint_path, run_folder, saves.
    files = [(PACKAGE / "config" / name).read_text(encoding="utf-8") for name in ("run.py", "experiment.py")]
    properties = ast.parse("".join(files))
    through = {
        node.attr
        for function in ast.walk(properties)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }
    unread = keys() - names_read(PACKAGE) - through
    assert unread == set(ONLY_CHECKED) - names_read(PACKAGE), unread


def test_a_key_that_nothing_reads_is_found(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "run.py").write_text("x = config.epochs\n")
    (tmp_path / "loop.py").write_text("y = config.batch_size\nz = values['seed']\nconfig.lr = 1\n")
    assert names_read(tmp_path) == {"batch_size", "seed"}


SECTIONS = (
    *("cyxjax.config.sections", "cyxjax.config.values"),
    *("cyxjax.config.effects", "cyxjax.config.compared"),  # about keys, without a value
)
# Places with the whole configuration: calls that take one, and the file that splits it into parts.
BORDER = {
    *("__main__", "experiment", "simple_trainer", "trainer", "plan", "settings", "schedules"),
    *("feeding/fit_data", "reporting", "replay/steps", "runs/run"),
}


def test_below_the_border_nothing_takes_the_whole_configuration():
    seen = {
        name.removeprefix("train/").removesuffix(".py")
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if name.startswith("train/")
        and isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("cyxjax.config")
        and node.module not in SECTIONS  # a section is a part
    }
    assert seen == BORDER


def test_every_field_of_a_part_is_read_by_a_room():
    # or `settings.py` would read keys for nobody, and the test above would not see it
    parts = [kind for kind in vars(settings).values() if hasattr(kind, "_fields") and kind.__doc__]
    mine = {name for part in parts if part.__module__ == settings.__name__ for name in part._fields}
    read = {
        node.attr
        for name, tree in trees().items()
        if name.startswith("train/") and name != "train/settings.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    inside = {"num_shares"}  # of BatchShape, which is unpacked
    assert len(mine) > 50
    assert mine - read <= inside, mine - read
