"""Configurations that want to run something, fill the memory, leave the run folder, or carry secrets."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.checkpoint.run_lock import RunLock
from cyxjax.cli import audit
from cyxjax.config.load import load_config
from cyxjax.errors import ConfigError, CyxjaxError
from cyxjax.train import experiment
from cyxjax.train.hooks.goodput import read
from cyxjax.train.replay import steps

PAYLOADS = [
    "!!python/object/apply:os.system ['touch {mark}']",
    "epochs: !!python/object/apply:os.mkdir ['{mark}']",
    "model: {{name: !!python/name:os.system}}",
    "data: {{name: !!python/object/new:subprocess.Popen [['touch', '{mark}']]}}",
    "seed: !!python/module:os",
    "model: {{name: \"__import__('os').mkdir('{mark}')\"}}",
    "run_dir: !include {mark}",
]


def refused(tmp_path, text):
    path = tmp_path / "evil.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        experiment.run(load_config(["--config", str(path)]))
    return str(caught.value)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_a_file_says_is_run(tmp_path, monkeypatch, group, payload):
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    refused(tmp_path, payload.format(mark=mark))
    assert not mark.exists()
    assert os.listdir(tmp_path) == ["evil.yaml"]  # nor was anything written


def test_a_bomb_of_aliases_is_refused_quickly(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert len(refused(tmp_path, "\n".join(lines))) < 20_000


@pytest.mark.parametrize("folder", ["../../outside", "a/../../b"])
def test_checkpoints_do_not_climb_out_of_the_run_folder(tmp_path, folder):
    assert "checkpoint_dir" in refused(tmp_path, f"checkpoint_dir: {folder}")


@pytest.mark.parametrize("key", ["api_key", "token", "password", "aws_secret"])
def test_secrets_are_refused_and_not_repeated(tmp_path, key):
    assert "hunter2" not in refused(tmp_path, f"wandb: {{{key}: hunter2}}")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200) | st.text(alphabet="abc:-[]{}!&*#|>'\"%@\n \t,0.", max_size=80).map(str.encode)
)
def test_random_bytes_give_a_clear_error_or_a_configuration(tmp_path, raw):
    path = tmp_path / "random.yaml"
    path.write_bytes(raw)
    said = ""
    try:
        load_config(["--config", str(path)])
    except ConfigError as error:
        said = str(error)
    assert not said or "HINT" in said or "expected" in said


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_random_records_of_a_run_are_refused_without_a_traceback(tmp_path, raw):
    (tmp_path / "ledger.jsonl").write_bytes(raw)
    (tmp_path / "box.json").write_bytes(raw)
    (tmp_path / "goodput.json").write_bytes(raw)
    for command in (audit.main, steps.main):
        with pytest.raises(CyxjaxError):
            command([str(tmp_path)])
    assert read(tmp_path / "goodput.json") == {}


def test_run_folders_are_private(tmp_path):
    with RunLock(tmp_path / "runs" / "mine"):
        assert (tmp_path / "runs" / "mine").stat().st_mode & 0o077 == 0
