"""Every rule of optax by its name with its own arguments, any callable; a rate is told where it is known."""

import functools
import inspect
import types

import numpy as np
import optax
import pytest
import yaml

from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import load_config
from cyxjax.config.sections import OPTAX, OPTIMIZERS, OptimizerConfig
from cyxjax.errors import ConfigError
from cyxjax.train.start.optimizers import build_optimizer

pytestmark = pytest.mark.usefixtures("as_users_promote")

PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
GRADS = {"w": np.full((2, 3), 0.5, np.float32)}


def stepped(rule):
    state = rule.init(PARAMS)
    for _ in range(2):
        updates, state = rule.update(GRADS, state, PARAMS)
    return np.asarray(updates["w"])


def test_these_are_all_rules_of_optax_that_need_nothing_but_gradients():
    # lbfgs asks for the loss; optimistic_adam is deprecated for its second version
    takes_a_rate = {
        name
        for name in dir(optax)
        if not name.startswith(("_", "scale"))
        and isinstance(getattr(optax, name), types.FunctionType | functools.partial)
        and next(iter(inspect.signature(getattr(optax, name)).parameters), "") == "learning_rate"
    }
    assert takes_a_rate - {"lbfgs", "optimistic_adam"} == {*OPTAX, *OPTIMIZERS} - {"momentum"}


@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.parametrize("name", OPTAX)
def test_a_rule_by_its_name_is_optax_s_with_its_own_defaults(name):
    rule = build_optimizer(OptimizerConfig(name=name, lr=0.1))
    np.testing.assert_array_equal(stepped(rule), stepped(getattr(optax, name)(0.1)))
    assert rule.lr == 0.1


def test_its_own_arguments_stand_in_options_and_ours_in_their_keys():
    rule = build_optimizer(OptimizerConfig(name="adan", lr=0.1, options={"b3": 0.5}, weight_decay=0.3))
    np.testing.assert_array_equal(stepped(rule), stepped(optax.adan(0.1, b3=0.5, weight_decay=0.3)))
    rule = build_optimizer(OptimizerConfig(name="nadam", lr=0.1, betas=(0.5, 0.6)))
    np.testing.assert_array_equal(stepped(rule), stepped(optax.nadam(0.1, b1=0.5, b2=0.6)))
    rule = build_optimizer(OptimizerConfig(name="adam", lr=0.1, options={"nesterov": True}))
    np.testing.assert_array_equal(stepped(rule), stepped(optax.adam(0.1, nesterov=True)))


def mine(size: float, lr: float = 1.0):
    return optax.sgd(size * lr)


def without_rate(size: float = 0.25):
    return optax.sgd(size)


made = optax.sgd(0.5)
HERE = __name__


def test_any_callable_and_a_rule_that_is_made():
    rule = build_optimizer(OptimizerConfig(name=f"{HERE}:mine", lr=0.5, options={"size": 0.1}))
    np.testing.assert_array_equal(stepped(rule), stepped(optax.sgd(0.05)))
    assert rule.lr == 0.5
    for name in ("without_rate", "made"):
        assert not hasattr(build_optimizer(OptimizerConfig(name=f"{HERE}:{name}")), "lr")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"name": "adan", "momentum": 0.5}, "options"),
        ({"name": f"{HERE}:without_rate", "lr": 0.5}, "options"),
        ({"name": f"{HERE}:mine"}, "options"),
        ({"name": f"{HERE}:mine", "options": {"siz": 1}}, "options.siz"),
        ({"name": "adam", "options": {"learning_rate": 1}}, "options.learning_rate"),
    ],
)
def test_what_a_rule_does_not_take_is_named_with_its_key(values, key):
    with pytest.raises(ConfigError) as caught:
        build_optimizer(OptimizerConfig(**values))
    assert caught.value.key == key


def test_a_resolved_configuration_holds_what_was_given_and_loads_again(tmp_path):
    one = TrainConfig(optimizer={"name": "adan", "lr": 0.1, "options": {"b3": 0.5}})
    told = one.resolved()["optimizer"]
    assert told == {"name": "adan", "lr": 0.1, "options": {"b3": 0.5}}
    (tmp_path / "x.yaml").write_text(one.to_yaml())
    assert load_config(["--config", str(tmp_path / "x.yaml")]) == one
    assert set(yaml.safe_load(TrainConfig().to_yaml())["optimizer"]) == set(OptimizerConfig.model_fields)
