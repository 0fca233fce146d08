"""Malicious checkpoints: an attacker can write any bytes and compute matching digests.

Loading one never leaves its folder, never allocates more than its manifest allows, and ends in a clear
error or in the saved bits. (Nothing in the package can unpickle: tests/house/test_security_lint.py.)
"""

import hashlib
import json
import os
import random
import shutil
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import MANIFEST, decode, read_manifest
from cyxjax.errors import CheckpointError

TARGET = {"count": np.zeros((), np.int32), "kernel": np.zeros((4, 5), np.float32)}
STATE = {"count": np.int32(3), "kernel": np.arange(20, dtype=np.float32).reshape(4, 5)}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine")
    Checkpointer(directory, async_save=False).save(1, STATE, {"epoch": 1})
    return directory


def body_of(run):
    return json.loads((step_folder(run, 1) / MANIFEST).read_text())["manifest"]


def sealed(body):
    """`body` as a manifest with a matching digest."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f'{{"manifest":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def seal(run, body):
    """Writes `body` as the manifest of step 1."""
    (step_folder(run, 1) / MANIFEST).write_bytes(sealed(body))


def reseal_files(run):
    """Updates the manifest to the files as they are now, as an attacker would."""
    body, folder = body_of(run), step_folder(run, 1)
    body["files"] = [
        {
            "path": path.relative_to(folder).as_posix(),
            "num_bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    seal(run, body)


def refuse(run, match="step 1: "):
    with pytest.raises(CheckpointError, match=f"(?s){match}"):
        Checkpointer(run).restore(TARGET)


def test_the_corpus_tests_what_it_means_to(run):
    """seal and reseal_files write an accepted manifest, so the refusals below have a different reason."""
    reseal_files(run)
    assert Checkpointer(run).restore(TARGET).state["kernel"].tolist() == STATE["kernel"].tolist()


PATHS = ["../evil", "arrays/../../evil", "/etc/passwd", "", ".", "a//b", "./x", ".hidden", "a\\b",
         "a\0b", "a/./b", "C:evil", "x" * 300, "arrays/\u202e", "~/x", 3, None, ["a"], {"a": 1}]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        *(("files", "path", x) for x in PATHS),
        *(("leaves", "shape", x) for x in ([2**63], [-1], [1.5], [True], [10**400], "45", None)),
        *(("leaves", "dtype", x) for x in ("object", "|O8", "U99999999", "V8", "f4,(99,)i4", ["f4"], None)),
        ("leaves", "name", 3), ("leaves", "name", None), ("leaves", "crc32", "x"), ("leaves", "crc32", -1),
        ("", "format", "other"), ("", "format_version", [4, 0]), ("", "format_version", [0, 9]),
        ("", "format_version", "1.0"), ("", "format_version", []), ("", "step", "1"), ("", "step", -1),
        ("", "step", 2**80), ("", "leaves", {}), ("", "leaves", 3), ("", "files", None), ("", "files", [[]]),
        ("", "metric", "low"), ("", "versions", []), ("", "meta", 3), ("", "created_unix_s", "now"),
    ],
)  # fmt: skip
def test_manifests_of_another_form_are_refused(run, place, field, value):
    body = body_of(run)
    (body[place][-1] if place else body)[field] = value
    seal(run, body)
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_manifest(step_folder(run, 1))  # before looking for any file that it names
    refuse(run)


def test_a_size_beyond_this_machine_is_refused_before_it_is_allocated(run):
    body = body_of(run)
    body["leaves"][1]["shape"] = [2**40, 2**10]
    seal(run, body)
    refuse(run, "is stored as float32")  # never the expected shape, so nothing is read
    with pytest.raises(CheckpointError, match="step 1: "):
        Checkpointer(run).restore(TARGET, adapt=lambda name, stored, want: None)


@pytest.mark.parametrize(
    ("kernel", "match"),
    [
        (np.ones((400, 500), np.float32), "'kernel' .*crc32"),  # larger than the manifest says
        (STATE["kernel"] + 1, "'kernel' .*crc32"),
    ],
    ids=["larger", "altered"],
)
def test_other_arrays_with_fitting_file_digests_are_found(run, tmp_path, kernel, match):
    Checkpointer(tmp_path / "other", async_save=False).save(1, {"count": np.int32(3), "kernel": kernel})
    shutil.rmtree(step_folder(run, 1) / "arrays")
    shutil.copytree(step_folder(tmp_path / "other", 1) / "arrays", step_folder(run, 1) / "arrays")
    reseal_files(run)
    refuse(run, match)


def test_a_manifest_of_gigabytes_is_not_read(run):
    os.truncate(step_folder(run, 1) / MANIFEST, 3 << 30)  # sparse; read, its digest would not match
    refuse(run, "MANIFEST.json: holds more than")


@pytest.mark.parametrize("is_writer", [True, False])
def test_links_are_refused_at_the_start_with_their_path(run, tmp_path, is_writer):
    (run / "step_00000007").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_00000007 .*HINT"):
        Checkpointer(run, is_writer=is_writer)


@pytest.mark.parametrize("name", [MANIFEST, "arrays", "arrays/process_00000.safetensors"])
@pytest.mark.parametrize("is_pipe", [False, True])
def test_links_and_special_files_inside_a_step_are_refused(run, tmp_path, name, is_pipe):
    inside = step_folder(run, 1) / name
    inside.rename(tmp_path / "moved")
    if is_pipe:
        os.mkfifo(inside)  # must not be waited for
    else:
        inside.symlink_to(tmp_path / "moved")
    refuse(run, "special file|MANIFEST")


def test_a_pipe_with_the_name_of_a_step_fails_its_save_and_is_not_waited_for(run):
    os.mkfifo(step_folder(run, 2))
    with Checkpointer(run) as checkpointer:
        checkpointer.save(2, STATE, {"epoch": 2})
        checkpointer.wait()
    assert step_folder(run, 2).is_fifo()
    assert sorted(path.name for path in run.iterdir()) == ["step_00000001", "step_00000002"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sealed_manifest_with_any_field_changed_is_read_or_refused(pristine, data):
    body = body_of(pristine)
    place = data.draw(st.sampled_from([body, body["leaves"][0], body["files"][0], body["versions"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    with suppress(CheckpointError):
        manifest = decode(sealed(body))
        assert all(".." not in entry.path.split("/") for entry in manifest.files)
        assert all(leaf.size >= 0 for leaf in manifest.leaves)


def test_random_damage_under_fitting_digests_is_refused_or_harmless(run):
    """200 cases: replaces bytes of the arrays' file, then seals it as an attacker would."""
    rng, path = random.Random(1), step_folder(run, 1) / "arrays" / "process_00000.safetensors"
    whole = path.read_bytes()
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 4, 16])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        reseal_files(run)
        with suppress(CheckpointError):  # not every byte matters: then the saved bits are restored
            restored = Checkpointer(run).restore(TARGET).state
            assert restored["kernel"].tobytes() == STATE["kernel"].tobytes()
            assert restored["count"] == 3
