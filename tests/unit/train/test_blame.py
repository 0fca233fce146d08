"""An error about a value of an experiment names the file, or the command line, and the key."""

import pytest

from cyxjax.config.load import load_config
from cyxjax.errors import CheckpointError, CyxjaxError, DataError
from cyxjax.train.experiment import prepare
from tests.support.refusals import refused_in_a_line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: mpl}", "x.yaml: model.name: No model named 'mpl'. HINT: Did you mean 'mlp'?"),
        ("model: {options: {hiden: 3}}", "x.yaml: model.options.hiden: Model 'mlp' has no option 'hiden'"),
        (
            "model: {options: {dropout: 3}}",
            "x.yaml: model.options.dropout: Option 'dropout' of model 'mlp' is 3",
        ),
        ("data: {name: digit}", "x.yaml: data.name: unknown dataset 'digit'. HINT: Did you mean 'digits'?"),
        ("data: {options: {seqlen: 3}}", "x.yaml: data.options.seqlen: dataset 'digits' has no option"),
        ("data: {name: csv}", "x.yaml: data.root: root=None of dataset 'csv' does not"),
        ("data: {name: csv, root: nowhere}", "x.yaml: data.root: root=nowhere of dataset 'csv' does not"),
        ("loss: mes", "x.yaml: loss='mes' is not known. HINT: Did you mean 'mse'?"),
        ("comm: zer1", "x.yaml: comm='zer1' is not a strategy. HINT: Did you mean 'zero1'?"),
        ("comm_options: {rank: 2}", "x.yaml: comm_options.rank: comm='mean' has no option 'rank'"),
        (
            "optimizer: {name: adam, options: {eps: x}}",
            "x.yaml: optimizer.options.eps: options: eps='x' does not suit optimizer 'adam', expected float",
        ),
        ("optimizer: {name: adamw, options: {nesterov: maybe}}", "x.yaml: optimizer.options.nesterov: "),
        ("optimizer: {name: lars, options: {eps: null}}", "x.yaml: optimizer.options.eps: options: eps=None"),
        (
            "schedule: {name: exponential_decay, options: {transition_steps: many, decay_rate: 0.9}}",
            "x.yaml: schedule.options.transition_steps: schedule.options: transition_steps='many' does not",
        ),
        ("comm: power_sgd\ncomm_options: {rank: 1.5}", "x.yaml: comm_options.rank: comm_options: rank=1.5"),
        ("comm: local_sgd\ncomm_options: {every: 0}", "x.yaml: comm_options: every=0: expected"),
        ("metrics: [{name: top_k, options: {k: x}}]", "x.yaml: metrics.0"),
        ("callbacks: [{name: EMA, options: {decay: x}}]", "x.yaml: callbacks.0"),
        ("data: {options: {val_fraction: half}}", "x.yaml: data.options.val_fraction: "),
        ("data: {name: text, options: {sequence_length: long}}", "x.yaml: data.options.sequence_length: "),
        ("data: {name: text, options: {sequence_length: 0}}", "x.yaml: data.options.sequence_length: "),
        ("run_dir: x.yaml/out", "x.yaml: run_dir="),
        ("monitor: val_los", "x.yaml: monitor='val_los' "),
    ],
)
def test_a_value_of_a_file_is_found_by_its_message(cwd, text, message):
    (cwd / "x.yaml").write_text(text + "\n")
    with refused_in_a_line(CyxjaxError) as caught:
        prepare(load_config(["--config", "x.yaml", "--verbose", "false"]))
    assert str(caught.value).startswith(message)
    assert [p.name for p in cwd.iterdir()] == ["x.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: mse", "^MSELoss: "),
        ("data: {name: csv, root: t.csv, options: {target: z}}", r"^x\.yaml: data: t\.csv: .*'z'"),
        ("resume: must", "^resume='must'.* runs/x/checkpoints"),
    ],
)
def test_what_is_found_in_the_data_or_a_folder_says_what_it_is(cwd, text, message):
    (cwd / "x.yaml").write_text(text + "\n")
    (cwd / "t.csv").write_text("a,y\n1,0\n2,1\n")
    kind = CheckpointError if "must" in text else DataError
    with refused_in_a_line(kind, match=message):
        prepare(load_config(["--config", "x.yaml", "--verbose", "false", "--model.options.hidden", "[4]"]))
    assert sorted(p.name for p in cwd.iterdir()) == ["t.csv", "x.yaml"]  # also no empty run folder
