"""Configurations and run records that try to execute code, or are not text."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.checkpoint.run_lock import locked
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


@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_a_file_says_is_run(cwd, group, payload):
    mark, path = cwd / "mark", cwd / "evil.yaml"
    path.write_text(payload.format(mark=mark))
    with pytest.raises(ConfigError):
        experiment.run(load_config(["--config", str(path)]))
    assert os.listdir(cwd) == ["evil.yaml"]  # neither run nor written


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200) | st.text(alphabet="abc:-[]{}!&*#|>'\"%@\n \t,0.", max_size=80).map(str.encode)
)
def test_random_bytes_give_a_clear_error_or_a_configuration(tmp_path, raw):
    (tmp_path / "random.yaml").write_bytes(raw)
    message = "HINT"
    try:
        load_config(["--config", str(tmp_path / "random.yaml")])
    except ConfigError as error:
        message = str(error)
    assert "HINT" in message or "expected" in message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_random_records_of_a_run_are_refused_without_a_traceback(tmp_path, raw):
    for name in ("ledger.jsonl", "box.json", "goodput.json"):
        (tmp_path / name).write_bytes(raw)
    for command in (audit.main, steps.main):
        with pytest.raises(CyxjaxError):
            command([str(tmp_path)])
    assert read(tmp_path / "goodput.json") == {}


def test_run_folders_are_private(tmp_path):
    with locked(tmp_path / "runs" / "mine"):
        assert (tmp_path / "runs" / "mine").stat().st_mode & 0o077 == 0
