import copy
import pickle
from pathlib import Path

import pytest

from cyxjax.errors import ConfigError
from cyxjax.models.config import Config


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return path


def test_dots_and_brackets_reach_nested_values(tmp_path):
    config = Config.from_file(write(tmp_path, "model:\n  latent_size: 8\n  layers: [{size: 3}]\nlr: 0.1\n"))
    assert config.model.latent_size == config["model"]["latent_size"] == 8
    assert config.model.layers[0].size == 3
    assert (config.get("lr"), config.get("absent", 7), "lr" in config, len(config)) == (0.1, 7, True, 2)
    assert config.to_dict() == {"model": {"latent_size": 8, "layers": [{"size": 3}]}, "lr": 0.1}


def test_missing_setting_names_file_and_nearest(tmp_path):
    path = write(tmp_path, "model:\n  latent_size: 8\n")
    config = Config.from_file(path)
    with pytest.raises(ConfigError, match=r"'latent' .*x\.yaml: model.* 'latent_size'"):
        _ = config.model.latent
    with pytest.raises(KeyError, match="No setting 'modle'"):
        _ = config["modle"]
    assert not hasattr(config, "modle")  # needs an AttributeError


def test_changing_the_dict_leaves_the_config_alone():
    values = {"a": {"b": [1]}}
    config = Config(values)
    config.to_dict()["a"]["b"].append(2)
    values["a"]["b"].append(3)
    assert config.a.b == [1]


def test_copies_and_pickles_are_equal():
    config = Config({"a": {"b": 1}})
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config)) == {"a": {"b": 1}}


def test_empty_file_gives_no_settings(tmp_path):
    assert Config.from_file(write(tmp_path, "")).to_dict() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", r"x\.yaml: .*line 2"),
        ("- 1\n- 2\n", r"x\.yaml .*list"),
        ("a: !!python/object/apply:os.getcwd []\n", r"x\.yaml: .*os\.getcwd"),  # never runs code
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        Config.from_file(write(tmp_path, text))


def test_missing_file_names_the_path(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        Config.from_file(tmp_path / "absent.yaml")
