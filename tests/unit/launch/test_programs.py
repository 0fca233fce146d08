"""Compiled programs on disk: cache hits and misses, and that no fault of the cache ends a run."""

import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from cyxjax.launch.backend import programs
from cyxjax.launch.backend.programs import ProgramStore, find_folder


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path, warnings) -> ProgramStore:
    return ProgramStore(tmp_path / "a" / "programs", "one processor", warnings.append)


def the_file(store: ProgramStore) -> Path:
    (path,) = store._path.iterdir()
    return path


def test_what_was_put_is_found_by_another_process_of_the_same_facts(store, warnings):
    assert store.get("jit_f-12") is None
    store.put("jit_f-12", b"machine code")
    again = ProgramStore(store._path, "one processor", warnings.append)
    assert again.get("jit_f-12") == b"machine code"
    assert again.get("jit_f-1") is None
    assert ProgramStore(store._path, "another processor", warnings.append).get("jit_f-12") is None
    assert stat.S_IMODE(store._path.stat().st_mode) == 0o700
    assert stat.S_IMODE(the_file(store).stat().st_mode) == 0o600
    assert warnings == []


@pytest.mark.parametrize(
    "change",
    [
        lambda data, other: b"",
        lambda data, other: data[:-1],
        lambda data, other: data[:20],
        lambda data, other: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data, other: other,  # whole, and another program's
    ],
)
def test_a_damaged_entry_is_not_there_and_is_written_anew(store, change):
    store.put("jit_f-12", b"machine code")
    path = the_file(store)
    store.put("jit_g-34", b"another's")
    (other,) = set(store._path.iterdir()) - {path}
    path.write_bytes(change(path.read_bytes(), other.read_bytes()))
    assert store.get("jit_f-12") is None
    store.put("jit_f-12", b"machine code")
    assert store.get("jit_f-12") == b"machine code"


def test_a_program_of_another_user_is_not_there(store, monkeypatch):
    store.put("jit_f-12", b"machine code")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert store.get("jit_f-12") is None


SPOILED_FOLDERS = {  # -> the folder to use instead, if any
    "open": lambda path, patch: path.chmod(0o750),
    "another's": lambda path, patch: patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1),
    "link": lambda path, patch: path.symlink_to(path.rename(path.parents[1] / "elsewhere")),
    "file": lambda path, patch: os.replace(path, path.with_name("away")) or path.touch(),
    "nowhere": lambda path, patch: next(path.iterdir()) / "programs",
}


@pytest.mark.parametrize("spoil", SPOILED_FOLDERS)
def test_a_folder_that_is_not_this_users_alone_is_told_once_and_not_used(store, warnings, spoil, monkeypatch):
    store.put("jit_f-12", b"f")
    path = SPOILED_FOLDERS[spoil](store._path, monkeypatch) or store._path
    fresh = ProgramStore(path, "one processor", warnings.append)
    assert fresh.get("jit_f-12") is None
    for _ in range(2):
        fresh.put("jit_g-34", b"g")
    assert fresh.get("jit_g-34") is None
    (line,) = warnings
    assert "HINT: set CYXJAX_COMPILE_CACHE to a folder of your own, or to off." in line


def test_a_full_disk_is_told_once_and_left_alone(store, warnings, monkeypatch):
    store.put("jit_f-12", b"f")
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(programs, "write_whole", full)
    store.put("jit_g-34", b"g")
    store.put("jit_h-56", b"h")
    assert (full.call_count, len(warnings)) == (1, 1)
    assert store.get("jit_f-12") == b"f"  # existing entries still work


def test_the_entries_used_longest_ago_go(tmp_path, warnings):
    store = ProgramStore(tmp_path / "programs", "", warnings.append, max_bytes=8_000)
    draft = store._path / ".x.tmp"  # left behind
    for age, key in enumerate(("old-0", "old-1", "old-2", "old-3")):
        store.put(key, bytes(1_000))
        os.utime(store._place(key)[0], (1e9 + age, 1e9 + age))
    draft.touch()
    os.utime(draft, (1e9, 1e9))
    assert store.get("old-0") is not None  # from now on the newest
    for i in range(4):
        store.put(f"new-{i}", bytes(1_000))
    assert (draft.exists(), store.get("old-1"), store.get("old-0") is None) == (False, None, False)
    for i in range(20):
        store.put(f"new-{i}", bytes(1_000))
    assert sum(path.stat().st_size for path in store._path.iterdir()) <= 8_000
    assert store.get("new-19") is not None


@pytest.mark.parametrize(
    ("setting", "env", "jaxs_own", "folder"),
    [
        ("auto", {}, None, "/home/me/.cache/cyxjax/programs"),
        ("auto", {"XDG_CACHE_HOME": "/cache"}, None, "/cache/cyxjax/programs"),
        ("auto", {"XDG_CACHE_HOME": "cache"}, None, "/home/me/.cache/cyxjax/programs"),
        ("auto", {"XDG_CACHE_HOME": "/cache"}, "/jax", "/jax/cyxjax/programs"),
        ("auto", {}, "gs://bucket/programs", None),  # jax's own way
        ("auto", {"CYXJAX_COMPILE_CACHE": "off"}, "/jax", None),
        ("auto", {"CYXJAX_COMPILE_CACHE": "/mine"}, "/jax", "/mine/cyxjax/programs"),
        ("auto", {"CYXJAX_COMPILE_CACHE": ""}, None, "/home/me/.cache/cyxjax/programs"),
        ("off", {"CYXJAX_COMPILE_CACHE": "/mine"}, "/jax", None),
        ("~/kept", {"CYXJAX_COMPILE_CACHE": "off"}, "/jax", "/home/me/kept/cyxjax/programs"),
    ],
)
def test_where_programs_are_kept(setting, env, jaxs_own, folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert find_folder(setting, env, jaxs_own) == (None if folder is None else Path(folder))


@pytest.fixture
def kept(monkeypatch) -> list[ProgramStore | None]:
    """The store that each call of `programs.keep` passes to jax."""
    stores: list[ProgramStore | None] = []
    monkeypatch.setattr(programs.jax_private, "keep_programs", stores.append)
    return stores


def test_programs_of_another_number_of_threads_are_not_found_and_off_keeps_none(tmp_path, kept):
    for threads in ({"NPROC": "2"}, {"NPROC": "2"}, {"NPROC": "3"}, {}):
        programs.keep(env={programs.VARIABLE: str(tmp_path)} | threads)
    programs.keep(env={programs.VARIABLE: "off"})
    *stores, off = kept
    stores[0].put("jit_f-12", b"f")
    assert [store.get("jit_f-12") for store in stores] == [b"f", b"f", None, None]
    assert off is None


@pytest.mark.parametrize("tell", [True, False])
def test_a_folder_that_cannot_be_is_one_line_of_the_rank_that_tells(tmp_path, kept, capsys, tell):
    (tmp_path / "file").touch()
    programs.keep(env={programs.VARIABLE: str(tmp_path / "file")}, tell=tell)
    for _ in range(2):
        kept[0].put("jit_f-12", b"f")
    assert capsys.readouterr().err.count("\n") == tell
