"""Paths that are no plain files, and malicious files: one clear line within seconds, and nothing hangs."""

import os

import pytest

from cyxjax.checkpoint.manifest import decode
from cyxjax.config.yaml_file import read_yaml
from cyxjax.data.catalog import load_dataset
from cyxjax.data.formats import read_bytes
from cyxjax.errors import CheckpointError, ConfigError, CyxjaxError
from cyxjax.models.registry import Config
from cyxjax.models.saved import load_model
from cyxjax.observe.history import DistributedTrainingHistory

pytestmark = pytest.mark.timeout(60)  # a reader that waits for the other end waits forever


@pytest.fixture(params=["FIFO", "device"])
def special(request, tmp_path):
    """A path that is not a plain file."""
    path = tmp_path / "special"
    if request.param == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


READERS = {
    "config": lambda path: read_yaml(str(path)),
    "model config": Config.from_file,
    "model": load_model,
    "history": DistributedTrainingHistory.load,
    "npz": lambda path: load_dataset("npz", path),
    "csv": lambda path: load_dataset("csv", path),
    "text": lambda path: load_dataset("text", path),
    "bytes": read_bytes,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_and_not_waited_for(special, reader):
    with pytest.raises(CyxjaxError, match="/special"):
        READERS[reader](special)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        "a: " + "{a: " * 50_000 + "}" * 50_000,
        "\n".join(" " * i + "a:" for i in range(1400)),
        "- " * 50_000,
    ],
    ids=["brackets", "braces", "indents", "dashes"],
)
def test_a_configuration_nested_50000_deep_is_refused(tmp_path, text):
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"deep\.yaml: "):
        read_yaml(str(tmp_path / "deep.yaml"))


def test_a_manifest_of_deep_json_is_refused():
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json "):
        decode(b'{"manifest":' + b"[" * 200_000)


def test_a_checkpoint_whose_history_is_a_list_is_refused():
    from cyxjax.train.resume import from_meta

    meta = {"position": {"step": 1, "epoch": 0}, "sums": [], "history": []}
    with pytest.raises(CheckpointError, match="trainer .*list"):
        from_meta(meta, None)
