"""A rule that climbs, or hands on a gradient as it came, is told from one that goes down."""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from cyxjax.core.optimizer.direction import refuse_uphill
from cyxjax.errors import ConfigError

PARAMS = {
    "Dense_0": {"bias": jax.ShapeDtypeStruct((64,), jnp.float32)},
    "Dense_1": {"kernel": jax.ShapeDtypeStruct((64, 32), jnp.float32)},
}
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def as_jax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def by_layer(**rules):
    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)

    return optax.multi_transform(rules, labels)


def takes_a_rate(module):
    """Names of the module's functions whose first argument is a learning rate."""
    return sorted(
        name
        for name in dir(module)
        if isinstance(found := getattr(module, name), types.FunctionType | functools.partial)
        and next(iter(inspect.signature(found).parameters), "") == "learning_rate"
        and not name.startswith(("scale", "_"))
    )


def told(rule, params=PARAMS):
    return refuse_uphill(rule, params)


GO_DOWN = {
    "sgd": optax.sgd(0.1),
    "a rate in bfloat16's rounding": optax.sgd(1e-12),
    "decay against the gradient": optax.adamw(1e-3, weight_decay=1e4),
    "noise beyond the gradient": optax.noisy_sgd(0.1, eta=1e6, gamma=0.0, key=KEY),
    "a warm-up from 0": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1000, 2000)),
    "accumulating": optax.MultiSteps(optax.adam(0.1), 3),
    "accumulating longer than is asked": optax.MultiSteps(optax.adam(0.1), 100),
    "every third": optax.chain(optax.apply_every(3), optax.sgd(0.1)),
    "climbing first": contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "told the loss": optax.polyak_sgd(),
    "no line search": optax.lbfgs(0.1, linesearch=None),
    "frozen": by_layer(Dense_0=optax.set_to_zero(), Dense_1=optax.adam(0.1)),
    "all frozen": optax.set_to_zero(),
    "rate 0": optax.sgd(0.0),
    "signs": optax.sign_sgd(0.1),
    "masked decay": optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
    "clipped": optax.chain(optax.adaptive_grad_clip(0.01), optax.clip_by_global_norm(1e-3), optax.adam(0.1)),
    "a mask by size": optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda leaf: leaf.size > 8, p)),
    "for real shapes": optax.chain(
        optax.stateless(lambda g, p: jax.tree.map(lambda a: a.reshape(64, -1), g)), optax.scale(1.0)
    ),
}
LONGER = (
    *("noise beyond the gradient", "accumulating", "accumulating longer than is asked", "every third"),
    *("told the loss", "no line search", "clipped"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONGER else ()) for name in GO_DOWN]
)
def test_what_goes_down_or_stands_still_passes(name):
    assert told(GO_DOWN[name]) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_rule_of_optax_with_a_rate_passes_and_no_part_of_one_does():
    needs = {"dpsgd", "lbfgs"}  # gradients of each sample; a line search
    rules = [getattr(m, name)(0.1) for m in (optax, contrib) for name in takes_a_rate(m) if name not in needs]
    rules += [contrib.prodigy(), contrib.cocob(), contrib.momo(), contrib.dadapt_adamw()]
    assert len(rules) > 40
    assert [told(rule) for rule in rules] == [""] * len(rules)
    parts = [name for name in dir(optax) if name.startswith("scale_by_")]
    needs = {
        "schedule",
        "backtracking_linesearch",
        "zoom_linesearch",
        "learning_rate",
        "stddev",
        "param_block",
    }
    climbing = []
    for name in parts:
        try:
            rule = getattr(optax, name)()
        except TypeError:  # it needs arguments
            continue
        try:
            told(rule)
        except ConfigError:
            climbing.append(name)
        else:
            assert name.removeprefix("scale_by_") in needs, name
    assert len(climbing) > 15


@pytest.mark.parametrize(
    "rule",
    [
        optax.scale_by_adam(),
        optax.normalize_by_update_norm(),
        optax.adadelta(),  # its rate is None
        optax.sgd(-0.1),
        optax.chain(optax.scale(-1), optax.sgd(0.1)),
        optax.chain(optax.add_decayed_weights(0.1), optax.clip(1.0)),
        optax.identity(),
    ],
    ids=["no rate", "a norm", "rate None", "rate below 0", "two signs", "decay alone", "nothing"],
)
def test_what_climbs_is_refused(rule):
    way = r"optax.chain\(optimizer, optax.scale_by_learning_rate\(0.001\)\)"
    with pytest.raises(ConfigError, match=f"along the gradient: the loss would grow. HINT: {way}"):
        told(rule)


def test_what_a_mask_leaves_out_is_not_trained_by_its_bare_gradient():
    matrices = lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)  # noqa: E731
    with pytest.raises(ConfigError, match=r"the gradient itself to 'Dense_0/bias': optax.masked hands on"):
        told(optax.masked(optax.sgd(0.1), matrices))
    assert told(optax.chain(optax.masked(optax.scale_by_adam(), matrices), optax.scale(-0.1))) == ""


def test_a_group_that_climbs_beside_others_is_told():
    # On purpose, or not: a multiplier is raised where parameters are lowered.
    assert "moves 'Dense_0/bias' up the gradient" in told(
        by_layer(Dense_0=optax.sgd(-0.1), Dense_1=optax.sgd(0.1))
    )


def test_of_several_optimizers_one_may_climb_and_is_told():
    assert "One of the optimizers moves what it trains up" in refuse_uphill(
        optax.sgd(-0.1), PARAMS, alone=False
    )
    assert refuse_uphill(optax.sgd(0.1), PARAMS, alone=False) == ""


def test_complex_parameters_and_those_of_half_precision():
    params = {"a": jax.ShapeDtypeStruct((3,), jnp.complex64), "b": jax.ShapeDtypeStruct((), jnp.bfloat16)}
    assert told(optax.sgd(0.1), params) == ""
    with pytest.raises(ConfigError, match="the loss would grow"):
        told(optax.scale_by_rms(), params)
