"""Schedules as objects and as named sections; rates as texts; rules that want the loss."""

import jax
import numpy as np
import optax
import pytest

import cyxjax as cx
from cyxjax.config.load import load_config
from cyxjax.config.sections import OPTAX_SCHEDULES, SCHEDULES, ScheduleConfig
from cyxjax.errors import ConfigError
from cyxjax.train.schedules import build_schedule
from cyxjax.train.settings import RatePlan, resolve
from tests.support.trainers import X, Y, config, mlp
from tests.support.trainers import own_group as own_group

pytestmark = pytest.mark.usefixtures("as_users_promote")

COSINE = optax.cosine_decay_schedule(0.1, 3)


def halved(step):
    return 0.5**step


def made(every=2):
    return lambda step: 0.5 ** (step // every)


def fit(optimizer, schedule=None, **options):
    train = cx.distributed.DistributedTrainer(mlp(), cx.CrossEntropyLoss(), optimizer)
    history = train.fit(
        X,
        Y,
        config(epochs=1, batch_size=None, global_batch_size=24, shuffle=False, **options),
        schedule=schedule,
    )
    return train.params, history.learning_rates


def test_a_schedule_is_a_rate_and_a_factor_and_both_are_told():
    ours, told = fit(cx.SGDOptimizer(COSINE))
    theirs, untold = fit(optax.sgd(COSINE))
    factor, told_too = fit(cx.SGDOptimizer(0.1), schedule=lambda step: COSINE(step) / 0.1)
    assert told == pytest.approx([float(COSINE(2))])
    assert told_too == pytest.approx(told)
    assert untold == []
    for other in (theirs, factor):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, other)


def plan(**section):
    cfg = cx.distributed.DistributedTrainingConfig(warmup_steps=2)
    return resolve(cfg, 1, 640, schedule=ScheduleConfig(**section)).step.rate


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"name": "exponential_decay", "options": {"transition_steps": "1e0", "decay_rate": 0.5}},
            [0.5, 1, 1, 0.5, 0.25],
        ),
        (
            {"name": "piecewise_constant_schedule", "options": {"boundaries_and_scales": {1: 0.1}}},
            [0.5, 1, 1, 0.1, 0.1],
        ),
        ({"name": f"{__name__}:halved"}, [0.5, 1, 1, 0.5, 0.25]),
        ({"name": f"{__name__}:made", "options": {"every": 1}}, [0.5, 1, 1, 0.5, 0.25]),
    ],
)
def test_a_section_names_one_of_optax_or_one_s_own(section, expected):
    factor = build_schedule(plan(**section))
    assert [float(factor(step)) for step in range(5)] == pytest.approx(expected)


def test_the_names_are_optax_s_and_what_is_wrong_is_one_line(tmp_path):
    assert all(callable(getattr(optax, name)) for name in OPTAX_SCHEDULES)
    with pytest.raises(ConfigError, match="'exponential_decay' .*'decay'.*'decay_rate'"):
        build_schedule(plan(name="exponential_decay", options={"decay": 1}))
    with pytest.raises(ConfigError, match=r"schedule\.name.*'cosin'.*'cosine'"):
        load_config(["--schedule.name", "cosin"])
    assert build_schedule(RatePlan("own", 2.0, own=halved))(1) == 1.0
    cfg = load_config(["--schedule.name", "exponential_decay", "--schedule.options.decay_rate", "0.5"])
    (tmp_path / "again.yaml").write_text(cfg.to_yaml())
    assert load_config(["--config", str(tmp_path / "again.yaml")]) == cfg


def test_a_group_in_a_file_is_checked_with_its_key(tmp_path):
    cfg = load_config(["--optimizer.groups", "[{match: 'a/*', lr: 1e-3}]"])
    assert cfg.optimizer.groups == ({"match": "a/*", "lr": 0.001},)
    (tmp_path / "again.yaml").write_text(cfg.to_yaml())
    assert load_config(["--config", str(tmp_path / "again.yaml")]) == cfg
    with pytest.raises(ConfigError, match=r"optimizer\.groups.*weight_decays: "):
        load_config(["--optimizer.groups", "[{match: 'a/*', weight_decays: 1}]"])


def test_a_line_search_is_refused_with_what_to_take():
    with pytest.raises(ConfigError, match=r"optax\.lbfgs\(lr, linesearch=None\)"):
        fit(optax.lbfgs(0.1))


def test_a_rule_that_wants_the_loss_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"optimizer\.name.*'reduce_on_plateau'"):
        load_config(["--optimizer.name", "reduce_on_plateau"])


@pytest.mark.parametrize("name", SCHEDULES)
def test_options_of_a_schedule_of_ours_are_refused_and_not_ignored(name):
    with pytest.raises(ConfigError) as refused:
        plan(name=name, options={"alpha": 0.5})
    assert refused.value.key == "schedule.options.alpha"


@pytest.mark.parametrize(
    "schedule", [lambda step: 1.5 - step, lambda step: np.float32("nan") * step, lambda step: 0.05]
)
def test_factors_below_0_nan_and_rates_are_refused_by_fit(schedule):
    with pytest.raises(ConfigError) as refused:
        fit(optax.sgd(0.1), schedule)
    assert refused.value.key == "schedule"
