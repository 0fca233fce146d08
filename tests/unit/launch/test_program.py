"""Which code a process runs, as digests."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cyxjax.launch import program


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two rooms in place of cyxjax."""
    folder = tmp_path / "package"
    for name in ("errors.py", "core/step.py", "sync/mean.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    monkeypatch.setattr(program, "PACKAGE", folder)
    return folder


def facts():
    return program.code_facts.__wrapped__()


def test_a_changed_a_new_and_a_moved_file_are_seen_in_their_room(package):
    before = facts()
    rooms = {"the code of cyxjax", "the code of cyxjax/core", "the code of cyxjax/sync"}
    assert rooms <= set(before)
    (package / "core" / "step.py").write_text("# another\n")
    changed = facts()
    assert {name for name in rooms if changed[name] != before[name]} == {"the code of cyxjax/core"}
    (package / "sync" / "new.py").touch()
    assert facts()["the code of cyxjax/sync"] != before["the code of cyxjax/sync"]
    (package / "sync" / "new.py").rename(package / "sync" / "newer.py")
    assert facts()["the code of cyxjax/sync"] != changed["the code of cyxjax/sync"]


def test_line_ends_are_no_other_code(package):
    before = facts()
    (package / "core" / "step.py").write_bytes(b"# core/step.py\r\n")
    assert facts() == before


def test_the_program_is_the_users_file_or_nothing(package, tmp_path, monkeypatch):
    own = tmp_path / "train.py"
    own.write_text("x = 1\n")
    installed = tmp_path / "site-packages" / "tool.py"
    installed.parent.mkdir()
    installed.touch()
    command = Path(sys.executable).parent / "python"  # where pip puts the command `cyxjax`
    found = {}
    for name, file in {
        "own": own,
        "tool": installed,
        "command": command,
        "ours": package / "errors.py",
    }.items():
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(file)))
        found[name] = facts().get("the program")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # a notebook, or python -c
    assert "the program" not in facts()
    assert found.pop("own").startswith("train.py ")
    assert set(found.values()) == {None}


def test_the_users_own_modules_are_told_by_their_digest_and_nothing_that_is_installed(tmp_path, monkeypatch):
    own, installed = tmp_path / "own_nets.py", tmp_path / "site-packages" / "bought.py"
    installed.parent.mkdir()
    for path in (own, installed):
        path.write_text("x = 1\n")
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)
    before = program.own_modules()
    assert before["own_nets"] == (program._digest([own], tmp_path), str(own))
    assert not {"bought", "json", "numpy", "cyxjax.launch.program"} & set(before)
    own.write_text("x = 2\n")
    os.utime(own, ns=(1, 1))  # written within the same tick of the clock as before, it may be
    assert program.own_modules()["own_nets"][0] != before["own_nets"][0]
    own.unlink()
    assert "own_nets" not in program.own_modules()


def test_the_program_is_told_by_the_name_another_would_import_it_by(tmp_path, monkeypatch):
    path = tmp_path / "own_train.py"
    path.write_text("x = 1\n")
    main = ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert program.own_modules()["own_train"][1] == str(path)


class LooksLikeAModule:
    """As cffi's libraries: it calls itself a module and has no attributes of its own."""

    __slots__ = ()
    __class__ = ModuleType


def test_what_only_calls_itself_a_module_is_none_of_the_user_s(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_library_of_c", LooksLikeAModule())
    assert "a_library_of_c" not in program.own_modules()
