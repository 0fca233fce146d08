"""A stored step of format 2 loads; what later minor versions add is no obstacle."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from cyxjax.checkpoint.checkpointer import Checkpointer
from cyxjax.checkpoint.folders import step_folder
from cyxjax.checkpoint.manifest import _DTYPES, MANIFEST, _sealed, decode
from cyxjax.errors import CheckpointError
from tests.data.make_checkpoint import META, fixture_state

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def stored(tmp_path):
    return Path(shutil.copytree(DATA / "checkpoint_v2", tmp_path / "stored"))


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
    reseal(stored, format_version=[2, 7], something_new={"a": 1})
    assert Checkpointer(stored).restore(fixture_state()).step == 12


@pytest.mark.parametrize("major", [1, 4])
def test_another_major_version_is_refused_by_number(stored, major):
    reseal(stored, format_version=[major, 0])
    with pytest.raises(CheckpointError) as refused:
        Checkpointer(stored).restore(fixture_state())
    assert f"[{major}, 0]" in str(refused.value)


def test_the_manifest_says_what_a_person_needs(stored):
    text = (step_folder(stored, 12) / MANIFEST).read_bytes()
    manifest = decode(text)
    assert manifest.encode() == text
    assert manifest.format_version == (2, 0)
    assert {"cyxjax", "jax", "numpy", "python"} <= set(manifest.versions)
    kernel = next(leaf for leaf in manifest.leaves if leaf.name == "params/Dense_0/kernel")
    assert (kernel.shape, kernel.dtype, kernel.num_bytes) == ((2, 3), "float32", 24)
    assert manifest.metric == 0.5


@pytest.mark.parametrize("dtype", sorted(_DTYPES))
def test_every_dtype_comes_back_in_its_bits(dtype, tmp_path):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.random.default_rng(0).integers(0, 2, (2, 3, kind.itemsize), np.uint8)  # 0 and 1 are bools too
    state = {"scalar": np.ones((), kind), "empty": np.zeros((0, 4), kind), "values": bits.view(kind)[..., 0]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        back = checkpointer.restore(state).state
    for name, leaf in state.items():
        assert (back[name].dtype, back[name].shape) == (kind, leaf.shape)
        assert back[name].tobytes() == leaf.tobytes()
        assert back[name].flags.writeable
