"""An experiment names objects of cyxjax, of installed packages, and the user's own `module:attribute`."""

import jax
import pytest

from cyxjax.config.load import load_config
from cyxjax.distributed import process_group
from cyxjax.errors import DataError
from cyxjax.train.experiment import prepare, run
from tests.support import brought
from tests.support.refusals import refused_in_a_line

HERE = "tests.support.brought"
FILE = f"""
model: {{name: "{HERE}:Net", options: {{width: 3}}}}
data: {{name: "{HERE}:data", options: {{rows: 48}}}}
loss: "{HERE}:brier"
metrics: [{{name: "{HERE}:sure", options: {{above: 0.6}}}}, "{HERE}:counted"]
callbacks:
  - "{HERE}:Count"
  - {{name: "{HERE}:Count", options: {{by: 10}}}}
  - {{name: EMA, options: {{decay: 0.5}}}}
sinks: [jsonl, "{HERE}:Lines"]
comm: "{HERE}:my_mean"
monitor: val_sure
epochs: 2
batch_size: 8
verbose: false
report: false
"""


@pytest.fixture
def experiment(cwd, two_devices):
    process_group.finalize()  # the run makes its own
    (cwd / "x.yaml").write_text(FILE)
    # user code and optax's Adam need jax's default promotion
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield lambda *words: load_config(["--config", "x.yaml", *words])


def test_everything_may_be_ones_own(experiment, tmp_path):
    brought.Count.epochs = 0
    assert run(experiment()) == 0
    assert brought.Count.epochs == 2 * (1 + 10)
    lines = (tmp_path / "runs" / "x" / "lines.txt").read_text()
    assert "val_sure" in lines
    assert "val_counted" in lines  # a statistic


def test_a_momentum_that_sgd_does_not_have_prints_a_line(experiment, capfd):
    prepare(experiment("--optimizer.name", "sgd", "--optimizer.momentum", "0.9"), goes_on=True)
    assert "sgd has no momentum" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "widths"), [("made", "{}", {3, 2}), ("NnxNet", "{width: 5}", {5, 2})]
)
def test_a_module_that_is_made_and_one_of_nnx(experiment, tmp_path, name, options, widths):
    (tmp_path / "x.yaml").write_text(FILE.replace("options: {width: 3}", f"options: {options}"))
    trainer = prepare(experiment("--model.name", f"{HERE}:{name}")).trainer
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(trainer.params)} == widths
    assert trainer.predict(brought.data()[0][0]).shape == (32, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.name", f"{HERE}:Nett"], r"model\.name: .*:Nett'"),
        (["--model.name", "nowhere.at:Net"], r"model\.name: .*'nowhere'"),
        (["--model.name", "a:b:c"], r"model\.name: .*'a:b:c'"),
        (["--loss", "my-loss:mse"], r"loss (?!.*NoneType).*'my-loss:mse'"),
        (["--model.name", "mpl"], r"model\.name: .*'mpl'"),
        (["--model.options.widht", "3"], r"model\.options\.widht: .*:Net"),
        (
            ["--data.options.row", "3"],
            r"data\.options\.row: .*'row'.* 'rows'",
        ),
        (
            ["--loss", "mine"],
            r"loss='mine' .*mse,.* module:attribute",
        ),
        (["--sinks", f"{HERE}:Liness"], r"sinks: .*'Liness'"),
        (["--comm", f"{HERE}:brier"], r"comm_options=\{\} .*comm='.*:brier'"),
        (
            ["--callbacks", "EarlyStop"],
            r"callbacks\.0: .*'EarlyStop'.* 'EarlyStopping'",
        ),
        (
            ["--callbacks", f"[{{name: '{HERE}:Count', options: {{to: 3}}}}]"],
            r"callbacks\.0.*:Count' .*'to'",
        ),
        (
            ["--metrics", f"[{{name: '{HERE}:sure', options: {{below: 3}}}}]"],
            r"metrics\.0.*:sure' .*'below'",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line_that_names_the_key(experiment, words, message):
    with refused_in_a_line(match=rf"^(command.line|x\.yaml): {message}"):
        prepare(experiment(*words))


def test_data_of_another_form_is_told_what_to_return(experiment, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "two_brought.py").write_text("def data(rows, name):\n    return 1, 2\n")
    with pytest.raises(DataError, match=r"tuple.*\(train, val, test\)"):
        prepare(experiment("--data.name", "two_brought:data", "--data.options.name", "own"))
