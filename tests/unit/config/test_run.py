"""The configuration as an object: attributes, bounds, and refused values."""

import pytest

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.config.values import seconds
from cyxjax.errors import ConfigError
from tests.support.refusals import refused_in_a_line

GUIDE = {
    "shuffle": True,
    "seed": 42,
    "verbose": True,
    "log_every_n_batches": 10,
    "checkpoint_every_n_epochs": 5,
    "checkpoint_dir": "./checkpoints",
    "save_on_master_only": True,
    "validation_split": 0.0,
    "drop_last": False,
    "resume": "never",  # a call of fit starts over
}


def test_documented_defaults_of_the_guide():
    assert DistributedTrainingConfig().model_dump(include=set(GUIDE)) == GUIDE
    assert TrainConfig().resume == "auto"  # a restarted experiment continues


def test_attribute_style_is_checked_at_once():
    config = DistributedTrainingConfig()
    config.epochs = 3
    with pytest.raises(ConfigError, match="epochs = 0: .*1"):
        config.epochs = 0
    assert config.epochs == 3
    with pytest.raises(ConfigError, match="'batchsize'.*'batch_size'"):
        config.batchsize = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="lr = -1.0"):
        TrainConfig().optimizer.lr = -1.0


def test_lora_says_its_rank():
    """Without a rank there are no adapters, and the whole model would be trained."""
    assert DistributedTrainingConfig(lora={"rank": 0, "alpha": 4}).lora.rank == 0  # off, on purpose
    for section in ({"alpha": 4}, {"pattern": "*kernel"}):
        with pytest.raises(ConfigError, match="lora = .*rank: 8"):
            DistributedTrainingConfig(lora=section)


def test_both_batch_sizes_are_never_given():
    config = DistributedTrainingConfig()
    config.batch_size = 32
    with pytest.raises(ConfigError, match="batch_size = 32 .*global_batch_size = 128"):
        config.global_batch_size = 128
    assert config.global_batch_size is None  # a refused assignment does not change the value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", True),
        ("epochs", 1.5),
        ("epochs", "ten"),
        ("validation_split", 1.0),
        ("max_grad_norm", float("inf")),
        ("max_grad_norm", float("nan")),
        ("seed", -1),
        ("precision", "float8"),
        ("precision", "compute=float64"),
        ("on_nonfinite", "ignore"),
        ("on_loss_spike", "skip"),
        ("loss_spike_factor", 1.0),
        ("max_time", "soon"),
        ("max_time", ""),
        ("shuffle", "maybe"),
        ("remat", "dots"),  # of several types: one line
        ("save_on_master_only", False),
    ],
)
def test_bad_values_are_named(field, value):
    with refused_in_a_line(match=rf"^DistributedTrainingConfig: {field} = .*HINT: "):
        DistributedTrainingConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "short", "value"),
    [
        ("precision", "bfloat16", "bfloat16"),
        ("precision", "bf16-mixed", "bfloat16"),
        ("precision", "params=float32,compute=float16", "params=float32,compute=float16"),
        # YAML reads on and off as true and false
        ("compile_cache", True, "auto"),
        ("compile_cache", False, "off"),
        ("compile_cache", "/kept", "/kept"),
        ("remat", True, "full"),
        ("remat", "true", "full"),
        ("remat", False, "none"),
        ("memory_pages", False, "off"),
    ],
)
def test_short_forms(field, short, value):
    assert getattr(DistributedTrainingConfig(**{field: short}), field) == value


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172800), ("45", 45), (7, 7)]
)
def test_spans_of_time(text, value):
    assert seconds(text) == value
