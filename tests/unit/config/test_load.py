"""File plus command line to one configuration: what wins, and one clear line for whatever is wrong."""

import pytest

from cyxjax.cli.main import main
from cyxjax.config.load import load_config
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.errors import ConfigError


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Writes an experiment file into an empty current folder; gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="x.yaml"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_the_command_line_wins_over_the_file(experiment):
    file = experiment("epochs: 3\nbatch_size: 16\noptimizer: {name: sgd, lr: 1e-2}\n")
    config = load_config(["--config", file, "--batch-size", "32", "--optimizer.lr=0.1", "--no-shuffle"])
    assert (config.epochs, config.batch_size, config.shuffle) == (3, 32, False)
    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 0.1)
    assert config.run_dir == "runs/x"  # named after the file


def test_checks_over_several_keys_name_both_sources(experiment):
    file = experiment("epochs: 3\n")
    with pytest.raises(ConfigError, match=r"^x\.yaml, .* lr_scaling"):
        load_config(["--config", file, "--lr-scaling", "sqrt"])


def test_dashes_and_underscores_are_one(experiment):
    assert load_config(["--log_every_n_batches", "3"]).log_every_n_batches == 3
    assert load_config(["--sinks", "csv", "jsonl"]).sinks == ("csv", "jsonl")
    assert load_config(["--sinks", "[]"]).sinks == ()
    assert load_config(["--optimizer.betas", "0.9", "0.95"]).optimizer.betas == (0.9, 0.95)
    assert load_config(["--max-grad-norm", "none"]).max_grad_norm is None


def test_options_take_yaml_values(experiment):
    file = experiment("model: {name: mlp, options: {hidden: [8], dropout: 1e-1}}\n")
    config = load_config(["--config", file, "--model.options.hidden", "[64, 32]", "--comm-options.rank=2"])
    assert config.model.options == {"hidden": [64, 32], "dropout": 0.1}
    assert config.comm_options == {"rank": 2}


def test_the_nearer_batch_size_wins(experiment):
    file = experiment("batch_size: 16\n")
    config = load_config(["--config", file, "--global-batch-size", "64"])
    assert config.global_batch_size == 64
    assert "batch_size" not in config.model_fields_set


def test_a_file_overrides_its_base_and_a_later_file_an_earlier_one(experiment, tmp_path, capsys):
    (tmp_path / "shared").mkdir()
    experiment("epochs: 3\nseed: 1\noptimizer: {name: sgd, lr: 0.5}\nbatch_size: 8\n", "shared/all.yaml")
    experiment("base: all.yaml\nseed: 2\n", "shared/mine.yaml")
    experiment("base: shared/mine.yaml\noptimizer: {lr: 0.25}\nglobal_batch_size: 64\n", "x.yaml")
    experiment("seed: 3\n", "y.yaml")
    words = ["--config", "x.yaml", "--config", "y.yaml", "--epochs", "9"]
    config = load_config(words)
    assert (config.epochs, config.seed, config.optimizer.name, config.optimizer.lr) == (9, 3, "sgd", 0.25)
    assert (config.global_batch_size, config.run_dir) == (64, "runs/y")
    assert main(["config", *words]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("#")] == [
        "# from shared/all.yaml: optimizer.name",
        "# from x.yaml: global_batch_size, optimizer.lr",
        "# from y.yaml: seed",
        "# from command line: epochs",
        "# all other keys: defaults",
    ]
    experiment(shown, "again.yaml")
    assert load_config(["--config", "again.yaml"]).model_dump() == config.model_dump()


def test_an_error_names_the_file_of_the_value_and_not_the_last_one(experiment):
    experiment("optimizer: {lr: -1}\n", "low.yaml")
    with pytest.raises(ConfigError, match=r"^low\.yaml: optimizer\.lr"):
        load_config(["--config", experiment("base: low.yaml\nepochs: 3\n")])


def test_two_files_that_are_bases_of_each_other_are_refused_in_a_line(experiment, capsys):
    experiment("base: x.yaml\n", "y.yaml")
    assert main(["config", "--config", experiment("base: y.yaml\n")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_variables_of_the_environment_take_the_type_of_their_key(experiment):
    file = experiment(
        "run_dir: ${env:JOB}\nepochs: ${env:EPOCHS:7}\nmax_steps: ${env:STEPS:none}\nshuffle: ${env:MIX}\n"
        "data: {root: '/data/${env:JOB}/${env:PART:a:b}'}\nsinks: ['${env:SINK}', jsonl]\n"
        "model: {options: {hidden: '${env:WIDTHS}', dropout: '${env:DROP:0.5}'}}\n"
    )
    env = {"JOB": "123", "MIX": "false", "SINK": "csv", "WIDTHS": "[64, 32]", "STEPS": "40"}
    config = load_config(["--config", file], env=env)
    assert (config.run_dir, config.epochs, config.max_steps, config.shuffle) == ("123", 7, 40, False)
    assert (config.data.root, config.sinks) == ("/data/123/a:b", ("csv", "jsonl"))
    assert config.model.options == {"hidden": [64, 32], "dropout": 0.5}
    del env["STEPS"]
    assert load_config(["--config", file], env=env).max_steps is None


def test_commands_read_the_environment_of_their_process(experiment, monkeypatch, capsys):
    file = experiment("epochs: ${env:MY_EPOCHS}\n")
    assert main(["config", "--config", file]) == 2
    assert "MY_EPOCHS" in capsys.readouterr().err
    monkeypatch.setenv("MY_EPOCHS", "11")
    assert main(["config", "--config", file]) == 0
    assert "epochs: 11" in capsys.readouterr().out


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
        ("epochs: 3\nepochs: 4\n", r"x\.yaml:2: .*'epochs'"),
        ("epochs: [3\n", r"x\.yaml:2: YAML"),
        ("seed: 2024-13-45\n", r"x\.yaml: .*month"),  # YAML takes it for a date
        ("model: {name: mlp}\nepochs: 010\n", r"x\.yaml:2: .*010 .*8"),
        ("seed: 1:30\n", r"x\.yaml:1: .*1:30 .*90"),
        (f"seed: {'9' * 5000}\n", r"x\.yaml: .*YAML: .*digits"),
        ("- 3\n", r"x\.yaml: .*list"),
        ("3: 4\n", r"x\.yaml:1: .*key"),
        ("model: {options: {a: &x 1, b: *x}}\n", r"x\.yaml:1: .*alias"),
        ("a: !!python/object/apply:os.system [date]\n", r"x\.yaml:1: YAML"),
        ("data: {options: {api_key: s3cr3t}}\n", r"x\.yaml: data\.options\.api_key .*WANDB_API_KEY"),
        ("wandb_token: abc\n", "wandb_token .*WANDB_API_KEY"),
        ("sinks: [cvs]\n", r"sinks\.0 = 'cvs'.*'csv'"),
        ("lr: 3\n", r"x\.yaml: .*'lr'.* optimizer\.lr"),
        ("learning_rate: 3\n", r"x\.yaml: .*'learning_rate'.* optimizer\.lr"),
        ("name: mlp\n", r"'name'.* model\.name .*data\.name .*optimizer\.name .*schedule\.name"),
        ("optimizer: {epochs: 3}\n", r"'optimizer\.epochs'.* epochs\b"),
        ("weight_decy: 3\n", r"'weight_decy'.*'optimizer\.weight_decay'"),
        ("foo: 3\n", r"x\.yaml: .*'foo'"),
        ("extends: base.yaml\n", r"x\.yaml: .*'extends'\. .*\bbase\b"),
        ("base: 3\n", "^3: "),
        ("base: x.yaml\n", r"x\.yaml: base"),
        ("base: none.yaml\n", r"none\.yaml: "),
        ("epochs: '${env:NO_SUCH}'\n", r"x\.yaml: \$\{env:NO_SUCH\}: NO_SUCH"),
        ("data: {root: '${env:MY_TOKEN:x}'}\n", r"x\.yaml: .*MY_TOKEN .*variable"),
        ("model: {options: {hidden: '${env:N:[3}'}}\n", r"x\.yaml: .*YAML"),
        ("data: {root: '${env:}'}\n", r"data\.root = '\$\{env:\}'"),
        ("run_dir: ~/runs\n", r"x\.yaml: run_dir = '~/runs': .*`~`"),
        ("data: {root: '${HOME}/x'}\n", r"data\.root = '\$\{HOME\}/x': .*env:NAME"),
        ("data: {root: $HOME/x}\n", r"data\.root = '\$HOME/x': .*env:NAME"),
        ("data: {options: {path: [~/x]}}\n", r"data\.options = .*`~`"),
        ("data: {root: 's3://b/x'}\n", r"data\.root = 's3://b/x': .*`mirror`"),
        ("run_dir: gs://b/x\n", "run_dir = 'gs://b/x': .*`mirror`"),
        ("checkpoint_dir: hdfs://b/x\n", "checkpoint_dir = 'hdfs://b/x': .*`mirror`"),
    ],
)
def test_a_bad_file_is_one_clear_line(experiment, tmp_path, text, message):
    file = experiment(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(["--config", file])
    assert "HINT: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [file]  # nothing written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epcohs", "3"], r"--epcohs\W.*'epochs'"),
        (["--no-epochs"], r"--no-epochs\W.*'epochs'"),
        (["--optimzer.lr", "3"], r"--optimzer\.lr\W.*'optimizer'"),
        (["--optimizer.weight-deacy", "3"], r"--optimizer\.weight-deacy.*'weight-decay'"),
        (["--optimizer", "adam"], r"--optimizer .*--optimizer\.lr"),
        (["--epochs"], "--epochs .*none"),
        (["--epochs", "3", "4"], "--epochs .*'3 4'"),
        (["--epochs", "ten"], "line: epochs = 'ten': .*integer"),
        (["--no-shuffle", "x"], "--no-shuffle .*'x'"),
        (["x.yaml"], r"'x\.yaml' .*--config x\.yaml"),
        (["--config"], "--config .*none"),
        (["--batch-size", "3", "--global-batch-size", "4"], "batch_size = 3 .*global_batch_size = 4"),
        (["--model.options.hidden", "[3"], r"--model\.options\.hidden .*YAML"),
        (["--lr-scaling", "linear"], "lr_scaling = 'linear' .*base_batch_size"),
        (["--lr", "3"], r"--lr\W.* optimizer\.lr"),
        (
            ["--model.hidden", "3"],
            r"--model\.hidden\W.* model\.options\.hidden",
        ),
        (["--confg", "3"], r"--confg\W.*'config'"),
        (["--foo", "3"], r"--foo\W.*--help"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(words)
    assert str(caught.value).count("\n") == 0
    assert "HINT: " in str(caught.value)


def test_missing_and_unreadable_files(experiment, tmp_path):
    experiment("", "digits.yaml")
    with pytest.raises(ConfigError, match=r"digit\.yaml: .*'digits\.yaml'"):
        load_config(["--config", "digit.yaml"])
    with pytest.raises(ConfigError, match=f"^{tmp_path}: "):
        load_config(["--config", str(tmp_path)])
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"model\.bin: "):
        load_config(["--config", "model.bin"])
    (tmp_path / "big.yaml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match=r"big\.yaml: .*1048576 bytes"):
        load_config(["--config", "big.yaml"])


def test_print_config_loads_again(experiment, tmp_path, capsys):
    file = experiment("global_batch_size: 64\nmodel: {options: {hidden: [8, 4]}}\nmax_time: 1h\n")
    with pytest.raises(SystemExit) as ended:
        load_config(["--config", file, "--print-config"])
    assert ended.value.code == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    first, again = load_config(["--config", file]), load_config(["--config", "again.yaml"])
    assert again.model_dump() == first.model_dump()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.yaml", "x.yaml"]


def test_help_shows_the_file_s_defaults(experiment, capsys):
    file = experiment("epochs: 77\n")
    with pytest.raises(SystemExit) as ended:
        load_config(["--config", file, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Passes over the data. (default: 77)" in shown
    assert "--optimizer.weight-decay FLOAT" in shown
    assert "--print-config" in shown


def test_fast_dev_run_is_short_and_apart(experiment):
    file = experiment("epochs: 50\nsinks: [wandb]\ncheckpoint_every_n_steps: 5\nrun_dir: runs/real\n")
    config = load_config(["--config", file, "--fast-dev-run"])
    assert (config.epochs, config.max_steps, config.max_eval_batches) == (1, 2, 2)
    assert config.checkpoint_every_n_steps == config.checkpoint_every_n_epochs == 0
    assert (config.resume, config.sinks, config.run_dir) == ("never", ("jsonl",), "runs/real-fast-dev-run")


def test_a_password_in_a_value_is_refused_like_one_under_a_telling_name(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data:\n  root: https://me:hunter2@host/data\n")
    with pytest.raises(ConfigError, match=r"data\.root .*WANDB_API_KEY") as refused:
        load_config(["--config", str(path)])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run_dir", "run_dir: ''"),
        ("checkpoint_dir", "checkpoint_dir: ' '"),
        ("data.root", "data: {root: ''}"),
        ("init_from.path", "init_from: {path: ''}"),
    ],
)
def test_an_empty_path_is_refused_and_not_taken_for_the_folder_one_is_in(experiment, key, text):
    with pytest.raises(ConfigError, match=f"{key} = "):
        load_config(["--config", experiment(text + "\n")])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("run_dir", r"fit\(X, y, run_dir="),
        ("output_dir", r"fit\(X, y, run_dir="),
        ("sinks", "fit.* run_dir"),
        ("optimizer", r"DistributedTrainer\(model\W+loss\W+optimizer"),
        ("learning_rate", r"cx\.AdamOptimizer"),
        ("lr", r"cx\.AdamOptimizer"),
        ("scheduler", r"fit\(\.\.\., schedule="),
        ("max_epochs", r"epochs\b"),
        ("betch_size", "'batch_size'"),
    ],
)
def test_a_program_is_told_where_it_says_what_a_file_has_a_key_for(key, said):
    with pytest.raises(ConfigError, match=rf"^DistributedTrainingConfig: .*'{key}'.* {said}"):
        DistributedTrainingConfig(**{key: 1})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("metrics: [3]", "expected a name, or `{name: ..., options: {...}}`"),
        ("callbacks: [{name: ema, decay: 0.9}]", "expected a name, or"),
        ("data: {augment: [{name: flip, options: 3}]}", "expected a name, or"),
        ("optimizer: {groups: [bias]}", "expected `{match: PATTERN, lr: NUMBER}`"),
        ("optimizer: {groups: [{match: bias, lr: -1}]}", "lr: Input should be greater than 0"),
        ("optimizer: {groups: [{match: bias, rate: 1}]}", "rate: Extra inputs are not permitted"),
        ("epochs: 2026-13-45", "month must be in 1..12"),
    ],
)
def test_what_a_list_holds_is_refused_with_what_is_expected(experiment, text, said):
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", experiment(text + "\n")])
    assert said.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("x.yaml")
