"""A message about a value of an experiment names the file, or the command line, and the key it stands at."""

import pytest

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import load_config
from cyxjax.errors import ConfigError
from cyxjax.train.experiment import prepare


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: mpl}", "x.yaml: model.name: No model named 'mpl'. HINT: Did you mean 'mlp'?"),
        ("model: {options: {hiden: 3}}", "x.yaml: model.options.hiden: Model 'mlp' has no option 'hiden'"),
        (
            "model: {options: {dropout: 3}}",
            "x.yaml: model.options.dropout: Option 'dropout' of model 'mlp' is 3",
        ),
        ("data: {name: digit}", "x.yaml: data.name: unknown data set 'digit'. HINT: Did you mean 'digits'?"),
        ("data: {options: {seqlen: 3}}", "x.yaml: data.options.seqlen: data set 'digits' has no option"),
        ("data: {name: csv}", "x.yaml: data.root: data set 'csv' is read from files"),
        ("data: {name: csv, root: nowhere}", "x.yaml: data.root: root=nowhere of data set 'csv' does not"),
        ("loss: mes", "x.yaml: loss='mes' is not known. HINT: Did you mean 'mse'?"),
        ("comm: zer1", "x.yaml: comm='zer1' is not a strategy. HINT: Did you mean 'zero1'?"),
        ("comm_options: {rank: 2}", "x.yaml: comm_options={'rank': 2} do not suit comm='mean'"),
        ("monitor: val_los", "x.yaml: monitor='val_los' is no metric of this run. HINT: Did you mean"),
    ],
)
def test_a_value_of_a_file_is_found_by_its_message(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        prepare(load_config(["--config", "x.yaml", "--verbose", "false"]))
    assert str(caught.value).startswith(message)
    assert "HINT: " in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"]


def test_a_value_of_the_command_line_is_told_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("model: {name: mlp}\n")
    with pytest.raises(ConfigError, match=r"^command line: model\.name: No model named 'mpl'\."):
        prepare(load_config(["--config", "x.yaml", "--model.name", "mpl"]))


def test_where_a_configuration_came_from_is_no_part_of_its_value(tmp_path):
    (tmp_path / "x.yaml").write_text("epochs: 3\nrun_dir: runs/x\n")
    read = load_config(["--config", str(tmp_path / "x.yaml")])
    assert read == TrainConfig(epochs=3, run_dir="runs/x")
    assert read.to_yaml() == TrainConfig(epochs=3, run_dir="runs/x").to_yaml()
