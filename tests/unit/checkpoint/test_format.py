"""The stored step of format version 1 loads, and what later minor versions add is no obstacle."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import FORMAT_VERSION, MANIFEST, _sealed, decode
from cyxjax.errors import CheckpointError
from tests.data.make_checkpoint_v1 import META, fixture_state

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def stored(tmp_path):
    return Path(shutil.copytree(DATA / "checkpoint_v1", tmp_path / "stored"))


def reseal(directory, **changes):
    path = step_folder(directory, 12) / MANIFEST
    path.write_bytes(_sealed(json.loads(path.read_bytes())["manifest"] | changes))


def test_the_stored_step_still_loads_bit_for_bit(stored):
    wanted = fixture_state()
    restored = Checkpointer(stored).restore(wanted)
    assert restored.step == 12
    # As text, for NaN is not equal to itself.
    assert json.dumps(restored.meta, sort_keys=True) == json.dumps(META, sort_keys=True)
    for found, leaf in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        leaf = np.asarray(leaf)
        assert (found.dtype, found.shape, found.tobytes()) == (leaf.dtype, leaf.shape, leaf.tobytes())


def test_a_later_minor_version_loads(stored):
    reseal(stored, format_version=[1, 7], something_new={"a": 1})
    assert Checkpointer(stored).restore(fixture_state()).step == 12


def test_another_major_version_is_refused_by_number(stored):
    reseal(stored, format_version=[2, 0])
    with pytest.raises(CheckpointError, match=r"version \[2, 0\]; this cyxjax reads .* version 1.x"):
        Checkpointer(stored).restore(fixture_state())


def test_the_manifest_says_what_a_person_needs(stored):
    text = (step_folder(stored, 12) / MANIFEST).read_bytes()
    manifest = decode(text)
    assert manifest.encode() == text
    assert manifest.format_version == FORMAT_VERSION == (1, 0)
    assert {"cyxjax", "jax", "orbax-checkpoint", "numpy", "python"} <= set(manifest.versions)
    kernel = next(leaf for leaf in manifest.leaves if leaf.name == "params/Dense_0/kernel")
    assert (kernel.shape, kernel.dtype, kernel.num_bytes) == ((2, 3), "float32", 24)
    assert manifest.metric == 0.5


def test_no_file_of_a_step_holds_the_path_it_was_written_to(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, fixture_state())
    for path in (tmp_path / "step_00000001").rglob("*"):
        assert path.is_dir() or tmp_path.name.encode() not in path.read_bytes()
