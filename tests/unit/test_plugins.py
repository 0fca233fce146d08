"""Entry points of installed packages, found by name."""

import pytest

from cyxjax.errors import ConfigError
from cyxjax.plugins import named


def test_one_name_of_two_packages_is_refused_with_both(tmp_path, monkeypatch):
    for package in ("net_a", "net_b"):
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(
            f"[cyxjax.models]\ntiny = {package[-1]}.nets:Tiny\nnet = os:sep\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="net_a .*net_b .*'tiny'|net_b .*net_a .*'tiny'"):
        named("model", "tiny", {})
    assert named("model", "tiny", {"tiny": "ours"}) == "ours"
    assert named("model", "net", {}) == "/"  # both mean the same
    with pytest.raises(ConfigError, match="'nt'.*'net'"):
        named("model", "nt", {})
