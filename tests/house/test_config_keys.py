"""Every configuration key is read by some code: no documented key is without effect."""

import ast
from collections.abc import Mapping

from pydantic import BaseModel

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train import settings
from tests.support.places import trees

ONLY_CHECKED = {  # key -> its effect although nothing outside config/ reads it
    "save_on_master_only": "false is refused",
    "fast_dev_run": "config/load.py turns it into other keys",
}


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """`model` and its sections."""
    sections = [f.annotation for f in model.model_fields.values()]
    return [model, *(s for s in sections if isinstance(s, type) and issubclass(s, BaseModel))]


def names_read(files: Mapping[str, ast.AST]) -> set[str]:
    """Attributes that are read outside config/, and names that are looked up: `values["name"]`, and arguments
    of a call such as getattr. A name in a list, as of the keys that make another run, is not read."""
    outside = [tree for name, tree in files.items() if not name.startswith("config/")]
    nodes = [node for tree in outside for node in ast.walk(tree)]
    found = [one for n in nodes if isinstance(n, ast.Call) for one in n.args]
    found += [n.slice for n in nodes if isinstance(n, ast.Subscript)]
    strings = {n.value for n in found if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return strings | {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


def keys() -> set[str]:
    every = [*models(TrainConfig), DistributedTrainingConfig]
    return {name for model in every for name in model.model_fields}


def test_every_key_is_read_outside_the_room_that_defines_it():
    # Properties of the models read keys for others: checkpoint_path, run_folder, saves.
    through = {
        node.attr
        for file in ("config/run.py", "config/experiment.py")
        for function in ast.walk(trees()[file])
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
    }
    read = names_read(trees())
    assert keys() - read - through == set(ONLY_CHECKED) - read


def test_a_key_that_nothing_reads_is_found():
    loop = "y = config.batch_size\nz = values['seed']\nconfig.lr = 1\nLIST = 'comm', 'lora'\n"
    files = {"config/run.py": ast.parse("x = config.epochs"), "loop.py": ast.parse(loop)}
    assert names_read(files) == {"batch_size", "seed"}


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
