"""Arrays are read from files of each kind, names are matched by rule or automatically, errors name them."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import save, save_file

from cyxjax.checkpoint.arrays import Entry
from cyxjax.checkpoint.exporting import to_orbax
from cyxjax.checkpoint.store import Snapshot, StepStore
from cyxjax.errors import CheckpointError, ConfigError
from cyxjax.weights import Weights
from cyxjax.weights.match import exported, fill
from cyxjax.weights.read import read_weights
from tests.support.refusals import refused_in_a_line

KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([0.5, -0.5, 0.25], np.float32)


def arrays(path):
    return {name: stored.read() for name, stored in read_weights(path).arrays.items()}


FLAT = {"params/dense/kernel": KERNEL, "params/dense/bias": BIAS}
TREE = {"params": {"dense": {"kernel": KERNEL, "bias": BIAS}}}


def shards(path):
    path.mkdir()
    save_file({"params/dense/kernel": KERNEL}, path / "model-1.safetensors")
    save_file({"params/dense/bias": BIAS, "left": BIAS}, path / "model-2.safetensors")
    table = {"params/dense/kernel": "model-1.safetensors", "params/dense/bias": "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def snapshot(path):
    """As of huggingface_hub: links into a folder beside it."""
    path.mkdir()
    save_file(FLAT, path.with_name("blob"))
    (path / "model.safetensors").symlink_to("../blob")


def step(path):
    StepStore(path, is_writer=True).write(Snapshot(3, FLAT | {"step": np.int32(3)}, {}, None))


KINDS = {  # what writes KERNEL and BIAS below a path, and the place there that is read
    "safetensors": (lambda path: save_file(FLAT, path), "."),
    "shards": (shards, "."),
    "snapshot": (snapshot, "."),
    "msgpack": (lambda path: path.write_bytes(serialization.msgpack_serialize(TREE)), "."),
    "orbax": (lambda path: to_orbax(path, FLAT), "."),
    "checkpoints": (step, "."),
    "checkpoint": (step, "step_00000003"),
    "run": (lambda path: step(path / "checkpoints"), "."),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_gives_its_arrays(kind, tmp_path):
    write, place = KINDS[kind]
    write(tmp_path / "weights")
    found = arrays(tmp_path / "weights" / place)
    assert found.keys() == {"params/dense/kernel", "params/dense/bias"}
    np.testing.assert_array_equal(found["params/dense/kernel"], KERNEL)
    np.testing.assert_array_equal(found["params/dense/bias"], BIAS)


def test_a_checkpoint_that_is_damaged_is_refused(tmp_path):
    step(tmp_path)
    folder = tmp_path / "step_00000003"
    (arrays_file,) = (folder / "arrays").iterdir()
    arrays_file.write_bytes(arrays_file.read_bytes()[:-1] + b"x")
    with refused_in_a_line(CheckpointError, match=f"{folder}: .*{arrays_file.name}"):
        read_weights(folder)


def test_short_floats_come_back_bit_for_bit(tmp_path):
    half = np.array([1.5, -2.25], ml_dtypes.bfloat16)
    (tmp_path / "x").write_bytes(save({"a": half, "b": np.array(True), "c": KERNEL[:0]}))
    found = arrays(tmp_path / "x")
    assert found["a"].dtype == half.dtype
    assert found["a"].tobytes() == half.tobytes()
    assert (found["b"].shape, found["c"].shape) == ((), (0, 3))


FITS = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def with_header(array):
    """A safetensors file whose header describes its only array as `array`."""
    text = json.dumps({"a": array}).encode()
    return len(text).to_bytes(8, "little") + text + KERNEL.tobytes()


def with_index(file):
    """A folder of shards whose index puts the array "c" in `file`."""
    return {
        "model-1.safetensors": with_header(FITS),
        "model.safetensors.index.json": json.dumps({"weight_map": {"c": file}}).encode(),
    }


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({"x": with_header(FITS | {"shape": [2, 4]})}, "x", "/x: "),
        ({"x": with_header(FITS | {"data_offsets": [8, 32]})}, "x", "/x: "),
        ({"x": with_header(FITS | {"shape": [-2, -3]})}, "x", "/x: "),
        ({"x": with_header(FITS | {"data_offsets": [-24, 0]})}, "x", "/x: "),
        ({"x": with_header(FITS | {"dtype": "F33"})}, "x", "/x: "),
        ({"x": with_header(3)}, "x", "/x: "),
        (with_index("../x/model-1.safetensors"), ".", r"index\.json .*'\.\./x/model-1\.safetensors'"),
        (with_index("model-1.safetensors"), ".", r"index\.json: .*'c'"),
        ({"x.txt": b"hello, there is nothing here"}, "x.txt", r"x\.txt: .*safetensors"),
        ({}, ".", r"\*\.safetensors.*step_"),
        ({}, "nowhere", "nowhere"),
        ({"_METADATA": b"no metadata"}, ".", "JSONDecodeError"),  # only looks like orbax
    ],
)
def test_what_holds_no_weights_is_refused_in_one_line(tmp_path, files, name, message):
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    with refused_in_a_line(CheckpointError, match=message):
        read_weights(tmp_path / name)


def given(**found):
    """Weights with these names; __ stands for a dot."""
    return Weights(
        {name.replace("__", "."): Entry.of(np.asarray(a)) for name, a in found.items()}, "safetensors"
    )


def wanted(**shapes):
    shape_of = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    return {name.replace("__", "/"): shape_of(shape) for name, shape in shapes.items()}


TARGETS = wanted(params__fc__kernel=(3, 2), params__fc__bias=(3,), model_state__batch_stats__norm__mean=(3,))


def test_torch_s_names_and_layouts_are_flax_s():
    found = fill(
        given(fc__weight=KERNEL, fc__bias=BIAS, norm__running_mean=BIAS, norm__num_batches_tracked=3),
        TARGETS | wanted(params__conv__kernel=(5, 7, 3, 2)),
        {},
        strict=False,
    )
    np.testing.assert_array_equal(found.values["params/fc/kernel"], KERNEL.T)
    for wrapper in ("_orig_mod__module__", "state_dict__module__", "module___orig_mod__"):
        wrapped = fill(given(**{f"{wrapper}fc__weight": KERNEL}), TARGETS, {}, strict=False)
        assert list(wrapped.values) == ["params/fc/kernel"]
    assert found.table[0] == "init_from: 3 of 4 arrays of the model (safetensors)"
    assert "  fc/kernel <- fc.weight float32[2, 3]" in found.table
    assert "  not filled: conv/kernel" in found.table
    window = np.arange(210, dtype=np.float32).reshape(2, 3, 5, 7)  # (out, in, height, width)
    conv = fill(given(conv__weight=window), wanted(params__conv__kernel=(5, 7, 3, 2)), {}, strict=True)
    np.testing.assert_array_equal(conv.values["params/conv/kernel"][4, 6, 2, 1], window[1, 2, 4, 6])


def test_rules_meet_other_names():
    targets = wanted(params__Block_0__Dense_0__kernel=(3, 2), params__Block_1__Dense_0__kernel=(3, 2))
    weights = given(enc__layer__0__fc__weight=KERNEL, enc__layer__1__fc__weight=2 * KERNEL, pooler=BIAS)
    rules = {"enc.layer.*.fc.weight": "Block_*/Dense_0/kernel", "pooler": None}
    found = fill(weights, targets, rules, strict=True)
    np.testing.assert_array_equal(found.values["params/Block_1/Dense_0/kernel"], 2 * KERNEL.T)


def test_a_rule_meets_a_checkpoint_s_names_as_the_model_has_them_and_one_that_meets_none_is_told(caplog):
    names = "params/fc/kernel", "params/head/kernel"
    held = Weights(dict.fromkeys(names, Entry.of(KERNEL)), "checkpoint")
    targets = wanted(params__fc__kernel=KERNEL.shape, params__head__kernel=KERNEL.shape)
    found = fill(held, targets, {"head/*": None}, strict=False)
    assert found.values.keys() == {"params/fc/kernel"}
    found = fill(held, targets, {"head/*": None, "*/kernel": "*/kernel"}, strict=False)
    assert found.values.keys() == {"params/fc/kernel"}  # the first rule that matches
    assert not caplog.text
    fill(held, targets, {"haed/*": None}, strict=False)
    assert "haed/*" in caplog.text


def test_what_is_exported_is_found_again_under_the_names_of_the_rules():
    model = {
        "params/Block_0/Dense_0/kernel": KERNEL,
        "params/Block_1/Dense_0/kernel": 2 * KERNEL,
        "params/Block_1/norm/scale": BIAS,
        "params/conv/kernel": np.arange(210, dtype=np.float32).reshape(5, 7, 3, 2),
        "params/both/kernel": KERNEL,
        "params/both/scale": BIAS,
        "params/odd.name/bias": BIAS,
        "model_state/batch_stats/norm/mean": BIAS,
    }
    rules = {"enc.layer.*.fc.weight": "Block_*/Dense_0/kernel", "*bo*": None, "*.*.gone": "*/left"}
    found = exported(model, rules)
    assert set(found) == {
        "enc.layer.0.fc.weight",
        "enc.layer.1.fc.weight",
        "Block_1.norm.weight",
        "conv.weight",
        "both.weight",
        "params/both/scale",
        "params/odd.name/bias",
        "norm.running_mean",
    }
    np.testing.assert_array_equal(found["enc.layer.1.fc.weight"], 2 * KERNEL.T)
    assert found["conv.weight"].shape == (2, 3, 5, 7)
    del rules["*.*.gone"], rules["*bo*"]
    again = fill(Weights({name: Entry.of(a) for name, a in found.items()}, "hf"), model, rules, strict=True)
    assert again.values.keys() == model.keys()
    for name, array in again.values.items():
        np.testing.assert_array_equal(array, model[name])
    later = {"bo.*": None, "*.weight": "*/kernel"}  # without the null the wildcard takes what it left out
    scale = {"params/fc/kernel": KERNEL, "params/bo/scale": BIAS}
    assert set(exported(scale, later)) == {"fc.weight", "params/bo/scale"}
    with pytest.raises(ConfigError, match="params/b"):
        exported({"params/a": BIAS, "params/b": BIAS}, {"*": "a"})


@pytest.mark.parametrize(
    ("found", "rules", "strict", "error", "message"),
    [
        ({"fc__weight": KERNEL}, {}, True, CheckpointError, "1 .*3 .*: fc/bias, model_state/batch_stats"),
        ({"fc__weight": KERNEL, "x": BIAS}, {}, True, CheckpointError, r": x\. .*init_from\.map"),
        ({"other": KERNEL}, {}, False, CheckpointError, "0 .*3 .*: fc/kernel"),
        ({"fc__bias": KERNEL}, {}, False, CheckpointError, r"fc.bias .*float32\[2, 3\], params/fc/bias "),
        ({"fc__weight": KERNEL.T}, {}, False, CheckpointError, r"fc\.weight .*\[3, 2\] .*\[2, 3\]"),
        ({"fc__bias": np.arange(3)}, {}, False, CheckpointError, r"fc.bias .*int64\[3\]"),
        (
            {"fc__bias": BIAS, "module__fc__bias": BIAS},
            {},
            False,
            CheckpointError,
            r"module\.fc\.bias .*params/fc/bias",
        ),
        ({"a": BIAS}, {"a": "fc/bais"}, False, ConfigError, "'a' .*'fc/bais'.* 'fc/bias'"),
        ({"a": BIAS}, {"b*": "fc/bias"}, False, ConfigError, r"'b\*'"),
        ({"a": BIAS}, {"a": "fc/*"}, False, ConfigError, "'a' .*'fc/'"),
    ],
)
def test_differences_are_named(found, rules, strict, error, message):
    with pytest.raises(error, match=message):
        fill(given(**found), TARGETS, rules, strict=strict)
