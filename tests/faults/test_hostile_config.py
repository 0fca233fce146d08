"""Configurations and run records that try to execute code, or are not text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyxjax.cli import audit
from cyxjax.config.load import load_config
from cyxjax.errors import ConfigError, CyxjaxError
from cyxjax.train.hooks.goodput import read
from cyxjax.train.replay import steps


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
