"""Every number of a configuration has bounds: what would overflow later is refused where it is read."""

from typing import get_args

import pytest
from annotated_types import Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cyxjax.cli import main
from cyxjax.config.errors import section_of
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.sections import GroupConfig


def fields(model: type[BaseModel], above: str = ""):
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield above + name, field
        else:
            yield from fields(section, f"{above}{name}.")


def holds_number(annotation) -> bool:
    return annotation in (int, float) or any(holds_number(part) for part in get_args(annotation))


def bounds(field: FieldInfo) -> list:
    inner = [extra for part in get_args(field.annotation) for extra in getattr(part, "__metadata__", ())]
    every = [*field.metadata, *(x for extra in inner for x in getattr(extra, "metadata", [extra]))]
    return [x for x in every if isinstance(x, Le | Lt)]


NUMBERS = {name: field for name, field in fields(TrainConfig) if holds_number(field.annotation)}


def test_every_number_has_an_upper_bound():
    open_ended = {name for name, field in NUMBERS.items() if not bounds(field)}
    assert open_ended == set()
    groups = {
        name for name, field in fields(GroupConfig) if holds_number(field.annotation) and not bounds(field)
    }
    assert not groups
    assert len(NUMBERS) > 40


@pytest.mark.parametrize("name", ["epochs", "max_steps", "seed", "optimizer.lr", "lora.rank", "max_time"])
@pytest.mark.parametrize("digits", [14, 4000, 5000])
def test_a_number_beyond_them_is_one_line_and_code_2(name, digits, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = f"--{name.replace('_', '-')}"
    assert main.main(["train", option, "9" * digits]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert len(line) < 400
    assert not list(tmp_path.iterdir())


def test_a_deleted_working_folder_is_one_line_and_code_2(tmp_path, capsys, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main.main(["train", "--epochs", "1"]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "WARNING" not in text]
    assert "folder" in line
