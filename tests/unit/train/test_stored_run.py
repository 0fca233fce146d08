"""A stored run is used without its program: loaded, evaluated, used to predict, and exported."""

import dataclasses
import json
import os
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors import safe_open

import cyxjax as cx
from cyxjax.cli import main
from cyxjax.config.experiment import TrainConfig
from cyxjax.data.splits import DatasetInfo
from cyxjax.distributed import process_group
from cyxjax.errors import CheckpointError, ConfigError, DataError
from cyxjax.train import experiment
from cyxjax.train.runs import exported, tables
from cyxjax.train.runs import run as stored
from tests.support.brought import made
from tests.support.trainers import command, config, same_bits, trainer

ROWS = np.random.default_rng(5).normal(size=(5, 4)).astype(np.float32)
SMALL = {
    "epochs": 2,
    "batch_size": 4,
    "steps_per_dispatch": 1,
    "model": {"name": "tests.support.brought:Net", "options": {"width": 3}},
    "data": {"name": "tests.support.brought:data"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "verbose": False,
    "report": False,
    "sinks": [],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a trained run, its trainer's predictions for ROWS and its test metrics)."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    # `init` writes into the environment.
    with mock.patch.dict(os.environ), cx.testing.devices(1), mock.patch.object(process_group, "init"):
        ready = experiment.prepare(TrainConfig(run_dir=str(folder), **SMALL | {"batch_size": 32}))
        experiment.train(ready)
        results = ready.trainer.predict(ROWS), ready.trainer.evaluate_metrics(ready.splits.test)
    return folder, *results


@pytest.fixture
def moved(run, tmp_path, two_devices):
    """The run's folder moved to a different path, with different devices and without its data."""
    return shutil.copytree(run[0], tmp_path / "elsewhere")


def test_a_run_is_loaded_where_it_lies_now_measured_and_trained_on(moved, run):
    found = cx.load_run(moved)
    assert found.config.run_dir == str(moved)
    assert found.step == 2
    assert found.info == DatasetInfo("tests.support.brought:data", "classification", 2, (4,))
    np.testing.assert_allclose(found.predict(ROWS), run[1], rtol=1e-6)
    assert found.params["Dense_0"]["kernel"].shape == (3, 2)
    direct = found.model.apply({"params": found.params}, ROWS)
    np.testing.assert_allclose(direct, run[1], rtol=1e-5)
    np.testing.assert_allclose(jax.jit(found.forward)(ROWS), run[1], rtol=1e-5)
    with_nan = ROWS.copy()
    with_nan[3, 1] = np.nan
    assert np.isnan(found.predict(with_nan)).any(1).tolist() == [False] * 3 + [True, False]
    x, y = found.data.test.take(np.arange(8))
    assert found.evaluate() == found.evaluate(x, y) == pytest.approx(run[2], rel=1e-6)
    assert found.evaluate(part="val")["loss"] != run[2]["loss"]
    quiet = {"checkpoint_every_n_epochs": 0, "verbose": False}
    found.trainer.fit(found.data.train, epochs=3, batch_size=32, **quiet)
    assert found.step > 2
    kept = moved / "data.json"  # as of a CSV file of words
    kept.write_text(kept.read_text().replace('"class_names": []', '"class_names": ["no", "yes"]'))
    assert cx.load_run(moved).trainer.class_names == ("no", "yes")


def test_samples_that_are_others_than_it_was_trained_on_are_told_once(moved, capfd, monkeypatch):
    assert main.main(["evaluate", str(moved), "--max-batches", "1"]) == 0
    assert "WARNING" not in capfd.readouterr().err
    read = stored.data_of

    def later(config):
        found = read(config)
        train, rows = found.train, np.arange(len(found.train))[::-1]
        return found._replace(train=type(train)(*(part[rows] for part in train.take(np.sort(rows)))))

    monkeypatch.setattr(stored, "data_of", later)
    run = cx.load_run(moved)
    run.evaluate(part="val")
    run.evaluate(part="test")
    message = capfd.readouterr().err
    assert message.count("WARNING: the training data changed since the checkpoint: sample 0:") == 1
    assert message.count("WARNING") == 1


@pytest.mark.parametrize("other", [{"vocabulary": "ab"}, {"class_names": ("no", "yes")}])
def test_samples_with_other_numbers_are_not_evaluated(moved, run, other, monkeypatch, capsys):
    splits = stored.data_of(stored.stored_config(run[0]))
    found = splits._replace(info=dataclasses.replace(splits.info, **other))
    monkeypatch.setattr(experiment, "data_of", lambda config: found)
    assert command("evaluate", moved, "--root", "other.txt") == 2
    assert "other.txt: " in capsys.readouterr().err


def test_rows_come_from_datasets_and_loaders_in_their_order(moved, run):
    found, order = cx.load_run(moved), np.array([3, 0, 4, 1, 2])

    class Items:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return ROWS[i], np.int32(7)  # an invalid target: predict ignores targets

    loader = cx.data.Batches([(ROWS[order[:3]], np.zeros(3)), (ROWS[order[3:]], np.zeros(2))])
    shuffled = cx.DataLoader((ROWS, np.zeros(5, np.int32)), batch_size=2, shuffle=True)
    for X in (Items(), cx.data.ArrayDataset(ROWS, ROWS), shuffled):
        np.testing.assert_array_equal(found.predict(X, batch_size=1), found.predict(ROWS, batch_size=1))
    np.testing.assert_allclose(found.predict(loader), run[1][order], rtol=1e-6)
    with pytest.raises(DataError, match="0 samples"):
        found.predict(ROWS[:0])


def test_what_is_no_run_is_refused(tmp_path, moved, group):
    without = shutil.copytree(moved, tmp_path / "without")
    shutil.rmtree(without / "checkpoints")
    for folder, step, error, message in (
        (tmp_path / "nowhere", None, ConfigError, "nowhere"),
        (tmp_path, None, ConfigError, r"config\.yaml"),
        (moved, 99, CheckpointError, "step"),
        (without, None, CheckpointError, "without/checkpoints"),
    ):
        with pytest.raises(error, match=message):
            cx.load_run(folder, step=step)


def test_evaluate_says_the_run_s_numbers(moved, run, capsys):
    assert command("evaluate", moved, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["step"], printed["part"], printed["samples"]) == (2, "test", 8)
    assert printed["loss"] == pytest.approx(run[2]["loss"], rel=1e-6)
    assert command("evaluate", moved, "--part", "val", "--max-batches", "1") == 0
    assert capsys.readouterr().out.startswith("step 2, val, at most 1 batches of 8 samples: loss ")
    diverged = {"loss": np.inf, "accuracy": np.nan, "table": np.array([np.nan, 1.0])}
    with mock.patch.object(cx.DistributedTrainer, "evaluate_metrics", return_value=diverged):
        assert command("evaluate", moved, "--max-batches", "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN is not JSON
    assert printed == {"step": 2, "part": "test", "loss": "inf", "table": ["nan", 1.0]}


def test_evaluate_takes_a_stream_whose_length_is_not_known(moved, run, capsys, monkeypatch):
    read = stored.data_of

    def streamed(config):
        found = read(config)
        return found._replace(test=cx.data.Rows(list(zip(*found.test.take(np.arange(8)), strict=True))))

    monkeypatch.setattr(stored, "data_of", streamed)
    assert command("evaluate", moved, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"step": 2, "part": "test", **{name: pytest.approx(run[2][name]) for name in run[2]}}
    assert command("evaluate", moved, "--max-batches", "1") == 0
    assert capsys.readouterr().out.startswith("step 2, test, at most 1 batches of a stream: loss ")


def test_predict_reads_and_writes_files(moved, run, tmp_path, capsys):
    np.save(tmp_path / "x.npy", ROWS.astype(np.float64))
    np.savez(tmp_path / "x.npz", x=ROWS, other=ROWS)
    (tmp_path / "x.csv").write_text("a,b,c,d\n" + "\n".join(",".join(map(str, row)) for row in ROWS) + "\n")
    for name in ("x.npy", "x.csv"):
        assert command("predict", moved, tmp_path / name, tmp_path / "out.npy") == 0
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), run[1], rtol=1e-5)
    assert f"step 2: float32[5, 2] -> {tmp_path / 'out.npy'}" in capsys.readouterr().out
    assert command("predict", moved, tmp_path / "x.npz", tmp_path / "out.csv") == 0
    assert (tmp_path / "out.csv").read_text().startswith("class,output_0,output_1\n")
    rows = np.loadtxt(tmp_path / "out.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(rows, np.column_stack([run[1].argmax(1), run[1]]), rtol=1e-5)


def test_outputs_in_bfloat16_are_written_as_float32(tmp_path):
    info = DatasetInfo("csv", "regression", 1, (4,))
    for name in ("o.npy", "o.npz"):
        tables.write_outputs(tmp_path / name, np.array([[1.5]], ml_dtypes.bfloat16), info)
    for found in (np.load(tmp_path / "o.npy"), np.load(tmp_path / "o.npz")["output"]):
        assert (found.dtype, found.tolist()) == (np.float32, [[1.5]])


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        ("-0.5,1e-3,2,7", 2),
        ("3,1,0,0", 2),
        ("0.5,1.5", 2),
        ("0", 2),
        ("1", 2),
        ("a,b,c", 1),
        ("1,b,c", 1),
        ("0,1", 1),  # pandas numbers its columns
    ],
)
def test_a_csv_without_a_header_keeps_its_first_sample(first, rows, tmp_path):
    (tmp_path / "x.csv").write_text(f"{first}\n{','.join('1' for _ in first.split(','))}\n")
    found = tables.read_inputs(tmp_path / "x.csv", np.zeros((1, first.count(",") + 1), np.float32))
    assert len(found) == rows
    if rows == 2:
        np.testing.assert_array_equal(found[0], np.array(first.split(","), np.float32))


@pytest.mark.parametrize(
    ("names", "head", "row"),
    [
        ("abc", "c,a,b", [2, 3, 1]),
        ("abc", "a,b,c", [1, 2, 3]),
        ("abc", "0,1,2", [1, 2, 3]),  # pandas numbers what it knows no names of
        ("210", "2,1,0", [1, 2, 3]),
        ("201", "0,1,2", [3, 1, 2]),
        ("aab", "b,a,a", [1, 2, 3]),
        ("", "k,l,m", [1, 2, 3]),
        ("abc", "k,a,b", "k, a, b; .* a, b, c"),
        ("abc", "a,b,c,price", "a, b, c, price; .* a, b, c"),
    ],
)
def test_columns_of_a_csv_are_taken_by_their_names(names, head, row, tmp_path):
    (tmp_path / "x.csv").write_text(f"{head}\n{'1,2,3,4'[: 2 * head.count(',') + 1]}\n")
    read = lambda: tables.read_inputs(tmp_path / "x.csv", np.zeros((1, 3), np.float32), tuple(names))  # noqa: E731
    if isinstance(row, list):
        assert read().tolist() == [row]
    else:
        with pytest.raises(DataError, match=row):
            read()


@pytest.mark.parametrize(
    ("given", "kind", "wrong"),
    [
        ([0, 255], "uint8", None),
        ([0, 300], "uint8", 300),
        ([-1, 0], "uint8", -1),
        ([0, 2**32], "int32", 2**32),
    ],
)
def test_integers_that_do_not_fit_those_of_training_are_refused(given, kind, wrong, tmp_path):
    """300 was read as 44."""
    np.save(tmp_path / "x.npy", np.array(given))
    read = lambda: tables.read_inputs(tmp_path / "x.npy", np.zeros(1, kind)).tolist()  # noqa: E731
    if wrong is None:
        assert read() == given
    else:
        with pytest.raises(ConfigError, match=f"{wrong}.* {kind}"):
            read()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "RUN", "x.txt", "o.npy"], "x.txt: expected a name that ends in .npy, .npz, .csv"),
        (["predict", "RUN", "no.npy", "o.npy"], "no.npy: no such file"),
        (["predict", "RUN", "odd.npy", "o.npy"], "float32[5, 3]; the run was trained on float32[N, 4]"),
        (["predict", "RUN", "text.npy", "o.npy"], "the run was trained on float32[N, 4]"),
        (["predict", "RUN", "x.npy", "away/o.npy"], "its folder does not exist"),
        (["predict", "nowhere", "x.npy", "o.npy"], "nowhere: no such folder"),
        (["predict", "RUN", "x.npy", "./x.npy"], "x.npy: that is the input"),
        (
            ["evaluate", "RUN", "--batch-size", "0"],
            "argument --batch-size: '0'; expected a whole number from 1",
        ),
        (["evaluate", "RUN", "--root", "x"], "has no option 'root'"),
        (["export", "RUN", ".", "--to", "hf"], ". already exists"),
    ],
)
def test_a_wrong_word_costs_one_line(words, message, moved, cwd, capsys):
    np.save("x.npy", ROWS)
    np.save("odd.npy", ROWS[:, :3])
    np.save("text.npy", np.full((5, 4), "a"))
    before = sorted(cwd.iterdir())
    assert command(*[str(moved) if word == "RUN" else word for word in words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert sorted(cwd.iterdir()) == before


def test_safetensors_say_what_they_are_of(moved, tmp_path, capsys):
    assert command("export", moved, tmp_path / "o.safetensors") == 0
    with safe_open(tmp_path / "o.safetensors", "np") as file:
        assert file.get_tensor("params/Dense_0/kernel").shape == (3, 2)
        about = file.metadata()
    assert yaml.safe_load(about["cyxjax_config"])["model"]["name"] == "tests.support.brought:Net"
    assert (about["cyxjax_step"], DatasetInfo.from_json(about["cyxjax_data"]).num_classes) == ("2", 2)
    assert "step 2: 4 arrays, 0.00 MB -> " in capsys.readouterr().out


def test_an_hf_folder_starts_another_run_with_the_same_bits(moved, tmp_path, capsys):
    """Arrays from init_from have the names of the source folder in the exported folder."""
    rules, folder = {"body.fc.*": "Dense_0/*", "pooler.*": None}, tmp_path / "hf"
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 3}')
    values = yaml.safe_load((moved / "config.yaml").read_text())
    values["init_from"] = {"path": str(tmp_path), "map": rules}
    (moved / "config.yaml").write_text(yaml.safe_dump(values))
    assert command("export", moved, folder, "--to", "hf") == 0
    assert f"step 2: 4 arrays, 0.00 MB -> {folder}" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    about = json.loads((folder / "config.json").read_text())
    assert (about["model_type"], about["hidden_size"], about["cyxjax"]["step"]) == ("bert", 3, 2)
    wanted = cx.load_run(moved).params
    with safe_open(folder / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == ["Dense_1.bias", "Dense_1.weight", "body.fc.bias", "body.fc.kernel"]
        np.testing.assert_array_equal(file.get_tensor("Dense_1.weight"), wanted["Dense_1"]["kernel"].T)
    process_group.finalize()
    other = trainer(made)
    begin = config(init_from={"path": str(folder), "map": rules})
    other.prepare(ROWS, np.zeros(5, np.int32), config=begin)
    assert same_bits(other.params, wanted)


def as_stablehlo(path):
    return jax.export.deserialize(bytearray(path.read_bytes())).call


def as_onnx(path):
    runtime = pytest.importorskip("onnxruntime", reason="pip install 'cyxjax[onnx]'")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: session.run(None, {"x": rows})[0]


@pytest.mark.parametrize(
    ("form", "read", "words", "message"),
    [
        ("stablehlo", as_stablehlo, ["--platforms", "cuda"], "for cpu, cuda, any number of rows"),
        pytest.param("onnx", as_onnx, [], "inputs x, any number of rows -> ", marks=pytest.mark.slow),
    ],
)
def test_an_exported_program_gives_our_outputs(form, read, words, message, moved, run, tmp_path, capsys):
    if form == "onnx":
        pytest.importorskip("jax2onnx", reason="pip install 'cyxjax[onnx]'")
    path = tmp_path / "o.program"
    assert command("export", moved, path, "--to", form, *words) == 0
    printed = capsys.readouterr()
    assert message in printed.out
    assert (printed.out.count("\n"), printed.err) == (1, "")
    np.testing.assert_allclose(read(path)(ROWS), run[1], rtol=1e-5)
    assert command("export", moved, path, "--to", form, "--batch-size", "3") == 0
    np.testing.assert_allclose(read(path)(ROWS[:3]), run[1][:3], rtol=1e-5)


def test_a_program_in_bfloat16_is_compared_with_the_compiled_model(tmp_path):
    kernel = jax.random.normal(jax.random.key(0), (4, 4), "bfloat16")

    def forward(x):  # compiled, its sums are rounded less often than one by one
        x = x.astype("bfloat16")
        for _ in range(4):
            x = jax.nn.softmax(jax.nn.gelu(x @ kernel) + x)
        return x.astype("float32")

    exported.write_program(tmp_path / "o.hlo", "stablehlo", forward, ROWS)
    found = as_stablehlo(tmp_path / "o.hlo")(ROWS)
    np.testing.assert_allclose(found, jax.jit(forward)(ROWS), rtol=1e-5)
    assert np.abs(found - forward(ROWS)).max() > 1e-4


def test_what_cannot_be_exported_or_computes_something_else_leaves_no_file(tmp_path, monkeypatch):
    calls = []

    def forward(x):  # one answer as it is exported, another when it is asked; and a class that is masked
        calls.append(x)
        return jnp.concatenate([x * len(calls), jnp.full_like(x[:, :1], -jnp.inf)], 1)

    with pytest.raises(DataError, match="output .*--to"):
        exported.write_program(tmp_path / "o.hlo", "stablehlo", forward, ROWS)
    monkeypatch.setattr(exported, "extra", lambda module, install: None)
    refuses = mock.Mock(side_effect=TypeError("no plugin for\nprimitive 'sort'"))
    monkeypatch.setattr(exported, "_onnx", refuses)
    with pytest.raises(ConfigError, match="onnx: TypeError.*'sort' .*--batch-size"):
        exported.write_program(tmp_path / "o.onnx", "onnx", lambda x: x, ROWS)
    assert list(tmp_path.iterdir()) == []


def test_a_table_whose_columns_lie_elsewhere_is_not_trained_on(tmp_path, one_device):
    x = np.random.default_rng(0).normal(size=(20, 2)).round(3)
    for name, columns in {"a": (0, 1), "b": (1, 0)}.items():
        rows = [f"{row[columns[0]]},{row[columns[1]]},{row.sum()}" for row in x]
        (tmp_path / f"{name}.csv").write_text(
            "\n".join(["ab"[columns[0]] + "," + "ab"[columns[1]] + ",y", *rows])
        )

    def train(name: str, epochs: int) -> None:
        data = {"name": "csv", "root": str(tmp_path / f"{name}.csv"), "options": {"task": "regression"}}
        settings = {**SMALL, "model": {"name": "mlp", "options": {"hidden": [2]}}, "loss": "mse"}
        settings |= {"data": data, "epochs": epochs, "run_dir": str(tmp_path / "run")}
        process_group.finalize()  # of a run that was refused
        experiment.train(experiment.prepare(TrainConfig(**settings)))

    train("a", 1)
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"b\.csv: .* b, a; .* a, b"):
        train("b", 2)
    data = tmp_path / "run" / "data.json"
    data.write_text(data.read_text().replace('"vocabulary": ""', '"vocabulary": "ab"'))  # of another text
    with pytest.raises(ConfigError, match=r"a\.csv: .*'a', 'b'"):
        train("a", 2)
    assert (tmp_path / "run" / "config.yaml").read_text() == before
