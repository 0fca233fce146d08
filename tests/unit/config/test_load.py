"""File and command line make one configuration: precedence, and one clear line per error."""

import json
import re

import pytest

from cyxjax.cli.main import main
from cyxjax.config.load import load_config
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.errors import ConfigError
from tests.support.refusals import refused_in_a_line


@pytest.fixture
def experiment(cwd):
    """Writes an experiment file into an empty current folder; its name."""

    def write(text, name="x.yaml"):
        (cwd / name).write_text(text)
        return name

    return write


def test_the_command_line_wins_over_the_file(experiment):
    file = experiment("epochs: 3\nbatch_size: 16\noptimizer: {name: sgd, lr: 1e-2}\n")
    config = load_config(
        ["--config", file, "--global-batch-size", "32", "--optimizer.lr=0.1", "--no-shuffle"]
    )
    assert (config.epochs, config.global_batch_size, config.shuffle) == (3, 32, False)
    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 0.1)
    assert "batch_size" not in config.model_fields_set
    assert config.run_dir == "runs/x"  # named after the file


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--log_every_n_batches", "3"], "log_every_n_batches", 3),
        (["--sinks", "csv", "jsonl"], "sinks", ("csv", "jsonl")),
        (["--sinks", "[]"], "sinks", ()),
        (["--max-grad-norm", "none"], "max_grad_norm", None),
        (["--remat"], "remat", "full"),
        (["--profile", "10:15"], "profile", "10:15"),
        (["--comm-options.rank=2"], "comm_options", {"rank": 2}),
        (["--mirror", "file:///my disk/run"], "mirror", "file:///my disk/run"),
        (["--loss", "next_token:loss"], "loss", "next_token:loss"),
        (["--comm-options", "{key: a, pad_token: b}"], "comm_options", {"key": "a", "pad_token": "b"}),
        (["--loss", "{name: mse, options: {a: 1}}"], "loss", {"name": "mse", "options": {"a": 1}}),
        *(
            (words, "metrics", ({"name": "f1", "options": {}}, {"name": "top_k", "options": {"k": 3}}))
            for words in (
                ["--metrics", "f1", "{name: top_k, options: {k: 3}}"],
                ["--metrics", "[f1, {name: top_k, options: {k: 3}}]"],
            )
        ),
    ],
)
def test_words_become_values(words, key, value):
    assert getattr(load_config(words), key) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("price #2", "price #2"),
        ("#1", "#1"),
        ("a#1", "a#1"),
        ("'price #2'", "price #2"),
        ("[1, 'a # b']", [1, "a # b"]),
        ("null", None),
    ],
)
def test_an_option_has_the_value_that_it_has_in_a_file_and_text_stays_whole(experiment, text, value):
    assert load_config(["--data.options.target", text]).data.options == {"target": value}
    file = experiment("data: {options: {target: '${env:T}'}}\n")
    assert load_config(["--config", file], env={"T": text}).data.options == {"target": value}


def test_options_take_yaml_values(experiment):
    file = experiment("model: {name: mlp, options: {hidden: [8], dropout: 1e-1}}\n")
    config = load_config(
        ["--config", file, "--model.options.hidden", "[64, 32]", "--optimizer.betas", "0.9", "0.95"]
    )
    assert config.model.options == {"hidden": [64, 32], "dropout": 0.1}
    assert config.optimizer.betas == (0.9, 0.95)
    steps = experiment("schedule: {options: {boundaries_and_scales: {100: 0.1, '200': 0.5}}}\n")
    given = load_config(["--config", steps]).schedule.options
    assert given == {"boundaries_and_scales": {"100": 0.1, "200": 0.5}}


def test_options_of_an_earlier_source_are_cleared_by_null(experiment):
    base = experiment("model: {name: mlp, options: {hidden: [8]}}\n")
    words = ["--config", base, "--model.name", "cnn", "--model.options", "null"]
    assert load_config(words).model.options == {}
    child = experiment("model: {name: cnn, options: null}\n", "child.yaml")
    assert load_config(["--config", base, "--config", child]).model.options == {}


@pytest.mark.parametrize(
    ("words", "path", "rules", "strict"),
    [
        ("--config path.yaml --init-from.strict false", "bert.safetensors", {}, False),
        ("--config path.yaml --init-from none", None, {}, True),
        ("--config path.yaml --config null.yaml", None, {}, True),
        ("--config rules.yaml --init-from other", "other", {"x": "y"}, False),
        ("--init-from w --init-from.strict false", "w", {}, False),
        ("--init-from.strict false --init-from w", "w", {}, False),
    ],
)
def test_a_path_of_init_from_is_merged_as_a_section(experiment, words, path, rules, strict):
    experiment("init_from: bert.safetensors\n", "path.yaml")
    experiment("init_from: {path: a, map: {x: y}, strict: false}\n", "rules.yaml")
    experiment("init_from: null\n", "null.yaml")
    found = load_config(words.split()).init_from
    assert (found.path, found.map, found.strict) == (path, rules, strict)


def test_a_name_in_a_file_of_weights_is_one_key():
    words = ["--init-from.map.*.a-b.token", "*/kernel", "--init-from.map.x", "none"]
    assert load_config(words).init_from.map == {"*.a-b.token": "*/kernel", "x": None}
    assert load_config(["--model.options.a-b.c-d", "3"]).model.options == {"a_b": {"c_d": 3}}


def test_none_in_a_file_is_none_where_a_key_may_be_left_out(experiment):
    file = experiment("max_grad_norm: none\nmax_time: none\nearly_stopping_patience: none\n")
    config = load_config(["--config", file])
    assert (config.max_grad_norm, config.max_time, config.early_stopping_patience) == (None, None, None)


def test_a_file_overrides_its_base_and_a_later_file_an_earlier_one(experiment, tmp_path, printed):
    (tmp_path / "shared").mkdir()
    experiment("epochs: 3\nseed: 1\noptimizer: {name: sgd, lr: 0.5}\nbatch_size: 8\n", "shared/all.yaml")
    experiment("base: all.yaml\nseed: 2\n", "shared/mine.yaml")
    experiment("base: shared/mine.yaml\noptimizer: {lr: 0.25}\nglobal_batch_size: 64\n", "x.yaml")
    experiment("seed: 3\n", "y.yaml")
    words = ["--config", "x.yaml", "--config", "y.yaml", "--epochs", "9"]
    config = load_config(words)
    assert (config.epochs, config.seed, config.optimizer.name, config.optimizer.lr) == (9, 3, "sgd", 0.25)
    assert (config.global_batch_size, config.run_dir) == (64, "runs/y")
    shown = printed(main, "config", *words)
    assert shown.startswith(config.to_yaml())
    assert [line for line in shown.splitlines() if line.startswith("#")] == [
        "# from shared/all.yaml: optimizer.name",
        "# from x.yaml: global_batch_size, optimizer.lr",
        "# from y.yaml: seed",
        "# from command line: epochs",
        "# all other keys: defaults",
    ]


def test_an_error_names_the_file_of_the_value_or_all_of_several_keys(experiment):
    experiment("optimizer: {lr: -1}\n", "low.yaml")
    with pytest.raises(ConfigError, match=r"^low\.yaml: optimizer\.lr"):
        load_config(["--config", experiment("base: low.yaml\nepochs: 3\n")])
    with pytest.raises(ConfigError, match=r"^x\.yaml, .* lr_scaling"):
        load_config(["--config", experiment("epochs: 3\n"), "--lr-scaling", "sqrt"])


def test_variables_of_the_environment_take_the_type_of_their_key(experiment):
    file = experiment(
        "run_dir: ${env:JOB}\nepochs: ${env:EPOCHS:7}\nmax_steps: ${env:STEPS:none}\nshuffle: ${env:MIX}\n"
        "data: {root: '/data/${env:JOB}/${env:PART:a:b}'}\nsinks: ['${env:SINK}', jsonl]\n"
        "model: {options: {hidden: '${env:WIDTHS}', dropout: '${env:DROP:0.5}'}}\n"
        "trainable: ['*/kernel', '${env:NUMBER}']\n"
    )
    env = {"JOB": "123", "MIX": "false", "SINK": "csv", "WIDTHS": "[64, 32]", "STEPS": "40", "NUMBER": "7"}
    config = load_config(["--config", file], env=env)
    assert (config.run_dir, config.epochs, config.max_steps, config.shuffle) == ("123", 7, 40, False)
    assert (config.data.root, config.sinks) == ("/data/123/a:b", ("csv", "jsonl"))
    assert config.model.options == {"hidden": [64, 32], "dropout": 0.5}
    assert config.trainable == ("*/kernel", "7")  # a text among texts
    del env["STEPS"]


def test_commands_read_the_environment_of_their_process(experiment, monkeypatch, printed):
    file = experiment("epochs: ${env:MY_EPOCHS}\n")
    monkeypatch.setenv("MY_EPOCHS", "11")
    assert json.loads(printed(main, "config", "--json", "--config", file))["epochs"] == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epocs: 3\n", r"x\.yaml: .*'epocs'.*'epochs'"),
        ("optimizer: {name: adam, lrr: 1}\n", r"x\.yaml: .*'optimizer\.lrr'.*'lr'"),
        ("optimizer: {name: adm}\n", r"optimizer\.name = 'adm'.*'adam'"),
        ("optimizer: {lr: -1}\n", r"x\.yaml: optimizer\.lr = -1: .*0"),
        ("optimizer: {betas: [0.9, 1.5]}\n", r"optimizer\.betas\.1 = 1\.5"),
        (
            "optimizer: adam\n",
            r"x\.yaml: optimizer = 'adam': .*`optimizer: \{name: \.\.\.\}`",
        ),
        ("epochs: yes\n", r"x\.yaml: epochs = True"),
        ("epochs: 3\nepochs: 4\n", r"x\.yaml: .*'epochs' .*line 2"),
        ("epochs: [3\n", r"x\.yaml: .*line 2"),
        ("seed: 2024-13-45\n", r"x\.yaml: .*month"),  # YAML takes it for a date
        ("model: {name: mlp}\nepochs: 010\n", r"x\.yaml: .*010 .*8.*line 2"),
        ("profile: 10:15\n", r"x\.yaml: .*10:15 .*615"),
        ("profile: '15:10'\n", r"x\.yaml: profile = '15:10': .*FIRST"),
        ("profile: '10'\n", r"x\.yaml: profile = "),
        ("profile: a:b\n", r"x\.yaml: profile = "),
        ("profile: '-1:5'\n", r"x\.yaml: profile = "),
        ("profile: '10:10'\n", r"x\.yaml: profile = '10:10': .*FIRST"),
        ("- 3\n", r"x\.yaml: .*list"),
        ("3: 4\n", r"x\.yaml: .*key"),
        ("model: {options: {a: &x 1, b: *x}}\n", r"x\.yaml: .*alias"),
        ("a: !!python/object/apply:os.system [date]\n", r"x\.yaml: .*os\.system"),
        ("wandb_token: 's3cr3t\n", r"x\.yaml: .*line 2"),
        ("data: {options: {api_key: s3cr3t}}\n", r"x\.yaml: data\.options\.api_key .*WANDB_API_KEY"),
        ("wandb_token: abc\n", "wandb_token .*WANDB_API_KEY"),
        ("sinks: csv\n", "sinks = 'csv': .*list"),
        ("sinks: [cvs]\n", r"sinks\.0 = 'cvs'.*'csv'"),
        ("lr: 3\n", r"x\.yaml: .*'lr'.* optimizer\.lr"),
        ("learning_rate: 3\n", r"x\.yaml: .*'learning_rate'.* optimizer\.lr"),
        ("name: mlp\n", r"'name'.* model\.name .*data\.name .*optimizer\.name .*schedule\.name"),
        ("optimizer: {epochs: 3}\n", r"'optimizer\.epochs'.* epochs\b"),
        ("weight_decy: 3\n", r"'weight_decy'.*'optimizer\.weight_decay'"),
        ("foo: 3\n", r"x\.yaml: .*'foo'"),
        ("extends: base.yaml\n", r"x\.yaml: .*'extends'\. .*\bbase\b"),
        ("base: 3\n", "^3: "),
        ("base: x.yaml\n", r"x\.yaml: base: "),
        ("base: none.yaml\n", r"none\.yaml: "),
        ("epochs: '${env:NO_SUCH}'\n", r"x\.yaml: \$\{env:NO_SUCH\}: NO_SUCH"),
        ("data: {root: '${env:MY_TOKEN:x}'}\n", r"x\.yaml: .*MY_TOKEN .*variable"),
        ("model: {options: {hidden: '${env:N:[3}'}}\n", r"x\.yaml: .*YAML"),
        ("model: {options: {width: '${env:N:010}'}}\n", r"x\.yaml: .*010.* 8\b"),
        ("data: {root: '${env:}'}\n", r"data\.root = '\$\{env:\}'"),
        ("run_dir: ~/runs\n", r"x\.yaml: run_dir = '~/runs': .*`~`"),
        ("data: {root: $HOME/x}\n", r"data\.root = '\$HOME/x': .*env:NAME"),
        ("data: {options: {path: [~/x]}}\n", r"data\.options = .*`~`"),
        ("data: {root: 's3://b/x'}\n", r"data\.root = 's3://b/x': .*`mirror`"),
        ("run_dir: gs://b/x\n", "run_dir = 'gs://b/x': .*`mirror`"),
        ("checkpoint_dir: hdfs://b/x\n", "checkpoint_dir = 'hdfs://b/x': .*`mirror`"),
        ("data: {root: 'https://me:s3cr3t@host/data'}\n", r"data\.root .*WANDB_API_KEY"),
        ("run_dir: ''\n", "run_dir = "),
        ("checkpoint_dir: ' '\n", "checkpoint_dir = "),
        ("data: {root: ''}\n", r"data\.root = "),
        ("checkpoint_dir: ../../outside\n", "checkpoint_dir = "),
        ("checkpoint_dir: a/../../b\n", "checkpoint_dir = "),
        ("init_from: {path: ''}\n", r"init_from\.path = "),
        ("metrics: [3]\n", r"x\.yaml: metrics.* `\{name"),
        ("callbacks: [{name: ema, decay: 0.9}]\n", r"x\.yaml: callbacks.* `\{name"),
        ("data: {augment: [{name: flip, options: 3}]}\n", r"x\.yaml: data\.augment.* `\{name"),
        ("optimizer: {groups: [bias]}\n", r"groups\.0 .* `optimizer\.groups\.0: \{match"),
        ("optimizer: {groups: [{match: bias, lr: -1}]}\n", r"groups\.0\.lr = -1: .* 0"),
        ("optimizer: {groups: [{match: bias, rate: 1}]}\n", r"'optimizer\.groups\.0\.rate'"),
    ],
)
def test_a_bad_file_is_one_clear_line(experiment, tmp_path, text, message):
    file = experiment(text)
    with refused_in_a_line(match=message) as caught:
        load_config(["--config", file])
    assert "s3cr3t" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [file]  # nothing written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epcohs", "3"], r"--epcohs\W.*'epochs'"),
        (["--no-epochs"], r"--no-epochs\W.*'epochs'"),
        (["--optimzer.lr", "3"], r"--optimzer\.lr\W.* optimizer\.lr"),
        (["--optimizer.weight-deacy", "3"], r"--optimizer\.weight-deacy.*'weight-decay'"),
        (["--optimizer", "adam"], r"optimizer = 'adam': .*`optimizer: \{name: \.\.\.\}`"),
        (["--optimizer", "adam", "--optimizer.lr", "0.1"], r"--optimizer .*--optimizer\.lr"),
        (["--epochs"], "--epochs .*none"),
        (["--epochs", "3", "4"], "--epochs .*'3 4'"),
        (["--epochs", "ten"], "line: epochs = 'ten': .*integer"),
        (["x.yaml"], r"'x\.yaml' .*--config x\.yaml"),
        (["--config"], "--config .*none"),
        (["--batch-size", "3", "--global-batch-size", "4"], "batch_size = 3 .*global_batch_size = 4"),
        (["--model.options.hidden", "[3"], r"--model\.options\.hidden .*YAML"),
        (["--model.options.width", "010"], r"--model\.options\.width .*010.* 8\b"),
        (["--model.options.hidden", "[1:30]"], r"--model\.options\.hidden .*1:30.* 90\b"),
        (["--model.options", "{a: 1, a: 2}"], r"--model\.options .*'a'"),
        (["--loss", "{name: mse"], "--loss .*YAML"),
        (["--callbacks", "{nam: EMA}"], r"callbacks.* `\{name"),
        (["--lr-scaling", "linear"], "lr_scaling = 'linear' .*base_batch_size"),
        (["--lr", "3"], r"--lr\W.* optimizer\.lr"),
        (
            ["--model.hidden", "3"],
            r"--model\.hidden\W.* model\.options\.hidden",
        ),
        (["--foo", "3"], r"--foo\W.*--help"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(words, message):
    with refused_in_a_line(match=message):
        load_config(words)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("digit.yaml", None, ".*'digits.yaml'"),
        (".", None, ""),
        ("model.bin", b"\xff\xfe\x00", ""),
        ("big.yaml", b"#" * (1 << 20) + b"\n", ".*1048576 bytes"),
    ],
)
def test_missing_and_unreadable_files(cwd, name, content, message):
    (cwd / "digits.yaml").touch()
    if content:
        (cwd / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}: {message}"):
        load_config(["--config", name])


def test_print_config_is_the_file_of_all_values_and_help_shows_the_file_s_defaults(experiment, capsys):
    words = ["--config", experiment("epochs: 77\nmodel: {options: {hidden: [8, 4]}}\nmax_time: 1h\n")]
    with pytest.raises(SystemExit, match="0"):
        load_config([*words, "--print-config"])
    assert capsys.readouterr().out == load_config(words).to_yaml()
    with pytest.raises(SystemExit, match="0"):
        load_config([*words, "--help"])
    assert "Passes over the data. (default: 77)" in " ".join(capsys.readouterr().out.split())


def test_fast_dev_run_is_short_and_apart(experiment):
    file = experiment("epochs: 50\nsinks: [wandb]\ncheckpoint_every_n_steps: 5\nrun_dir: runs/real\n")
    config = load_config(["--config", file, "--fast-dev-run"])
    assert (config.epochs, config.max_steps, config.max_eval_batches) == (1, 2, 2)
    assert config.checkpoint_every_n_steps == config.checkpoint_every_n_epochs == 0
    assert (config.resume, config.sinks, config.run_dir) == ("never", ("jsonl",), "runs/real-fast-dev-run")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("output_dir", r"fit\("),
        ("lr", "optimizer"),
        ("scheduler", r"fit\("),
        ("max_epochs", r"epochs\b"),
        ("betch_size", "'batch_size'"),
    ],
)
def test_a_program_is_told_where_it_says_what_a_file_has_a_key_for(key, message):
    with pytest.raises(ConfigError, match=rf"^DistributedTrainingConfig: .*'{key}'.* {message}"):
        DistributedTrainingConfig(**{key: 1})


def test_a_deleted_working_folder_is_one_line_and_code_2(tmp_path, capsys, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["train", "--epochs", "1"]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "WARNING" not in text]
    assert "folder" in line


def test_the_values_of_a_fast_dev_run_have_it_as_their_source(experiment, printed):
    file = experiment("epochs: 9\nbatch_size: 8\n")
    lines = printed(main, "config", "--config", file, "--fast-dev-run").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert [line for line in comments if "x.yaml" in line] == [f"# from {file}: batch_size"]
    assert any(line.startswith("# from fast_dev_run: ") for line in comments)
