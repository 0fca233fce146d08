"""Digests of the code that a process runs."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cyxjax.launch import program


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with two subpackages in place of cyxjax."""
    folder = tmp_path / "package"
    for name in ("errors.py", "core/step.py", "sync/mean.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    monkeypatch.setattr(program, "PACKAGE", folder)
    return folder


def facts():
    return program.code_facts.__wrapped__()


def test_a_changed_a_new_and_a_moved_file_are_seen_in_their_room(package):
    def rooms():
        found = facts()
        return [found[f"the code of cyxjax{room}"] for room in ("", "/core", "/sync")]

    before = rooms()
    (package / "core" / "step.py").write_bytes(b"# core/step.py\r\n")
    assert rooms() == before  # line ends do not change the code
    (package / "core" / "step.py").write_text("# another\n")
    changed = rooms()
    assert [one == other for one, other in zip(changed, before, strict=True)] == [True, False, True]
    (package / "sync" / "new.py").touch()
    added = rooms()
    (package / "sync" / "new.py").rename(package / "sync" / "newer.py")
    assert len({before[2], added[2], rooms()[2]}) == 3


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


class LooksLikeAModule:
    """Like cffi's libraries: it claims to be a module and has no attributes."""

    __slots__ = ()
    __class__ = ModuleType


def test_the_users_own_modules_are_told_by_their_digest_and_nothing_that_is_installed(tmp_path, monkeypatch):
    paths = [
        tmp_path / name
        for name in ("own_nets.py", os.fsdecode(b"own_train\xe9.py"), "site-packages/bought.py")
    ]
    paths[2].parent.mkdir()
    for path, name in zip(paths, ("own_nets", "__main__", "bought"), strict=True):
        path.write_text("x = 1\n")
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "library_of_c", LooksLikeAModule())
    before = program.own_modules()
    assert before["own_nets"] == (program._digest([paths[0]], tmp_path), str(paths[0]))
    assert before[paths[1].stem][1] == str(paths[1])  # by the name under which another would import it
    assert not {"bought", "library_of_c", "json", "numpy", "cyxjax.launch.program"} & set(before)
    paths[0].write_text("x = 22\n")
    assert program.own_modules()["own_nets"][0] != before["own_nets"][0]
    paths[0].unlink()
    assert "own_nets" not in program.own_modules()
