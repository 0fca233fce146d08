"""Which keys change numbers, arrays or nothing of a run is read from the fields of the configuration."""

import pytest

from cyxjax.config.compared import effect_of
from cyxjax.config.effects import NO_NUMBERS, PER_RANK, effects_of
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.run import DistributedTrainingConfig
from cyxjax.train.comparison import changed_keys
from cyxjax.train.fingerprints import equal_on_ranks

EXAMPLES = {
    "optimizer.lr": "arrays",
    "data.root": "content",
    "max_steps": "length",
    "keep_last": "view",
    "prefetch": "speed",
    "monitor": "course",
    "seed": "numbers",
    "of a program": "numbers",
}


@pytest.mark.parametrize("key", EXAMPLES)
def test_a_key_says_what_it_affects(key):
    assert effect_of(key) == EXAMPLES[key]


def test_a_program_and_an_experiment_say_the_same():
    experiment = effects_of(TrainConfig)
    library = effects_of(DistributedTrainingConfig)
    assert library == {name: experiment[name] for name in library}


@pytest.mark.parametrize("key", TrainConfig.model_fields)
def test_the_effect_decides_what_is_compared_with_a_checkpoint_and_between_ranks(key):
    then, now = {key: "then"}, {key: "now"}
    silent = effect_of(key) in NO_NUMBERS | {"length"}
    assert bool(changed_keys(then, now)) is not silent
    assert (key in equal_on_ranks(now)) is (effect_of(key) not in PER_RANK)


def test_a_key_without_a_mark_is_an_error():
    class Forgotten(TrainConfig):
        patience: int = 3

    with pytest.raises(KeyError, match="patience"):
        effects_of(Forgotten)
