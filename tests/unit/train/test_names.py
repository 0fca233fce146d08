"""Names in a file: optimizers, schedules, losses, metrics and augmentations, with their options."""

import functools
import inspect
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import yaml
from flax import linen

import cyxjax as cx
from cyxjax.config.experiment import TrainConfig
from cyxjax.config.load import load_config
from cyxjax.config.sections import (
    OPTAX,
    OPTAX_CONTRIB,
    OPTAX_SCHEDULES,
    OPTIMIZERS,
    SCHEDULES,
    OptimizerConfig,
    ScheduleConfig,
)
from cyxjax.core.model.augment import as_augment, check_augment
from cyxjax.data.splits import DatasetInfo
from cyxjax.errors import ConfigError
from cyxjax.train.schedules import build_schedule
from cyxjax.train.settings import RatePlan, resolve
from cyxjax.train.start.named import LOSSES, METRICS, augment_of, loss_of, metrics_of
from cyxjax.train.start.optimizers import build_optimizer
from tests.support.refusals import refused
from tests.support.trainers import X, Y, config, shake

pytestmark = pytest.mark.usefixtures("as_users_promote")

HERE = __name__
INFO = DatasetInfo("own", "classification", 3, (4,), class_names=("a", "b", "c"))


def test_a_resolved_configuration_holds_what_was_given_and_loads_again(tmp_path):
    adan = {"name": "adan", "lr": 0.1, "options": {"b3": 0.5}}
    decay = {"name": "exponential_decay", "options": {"decay_rate": 0.5}}
    one = TrainConfig(optimizer=adan, schedule=decay)
    assert one.resolved()["optimizer"] == adan
    for given in (
        one,
        TrainConfig(batch_size=7, optimizer={"groups": [{"match": "a/*", "lr": 0.001}]}),
        TrainConfig(global_batch_size=64, max_time="1h", model={"options": {"hidden": [8, 4]}}),
    ):
        (tmp_path / "x.yaml").write_text(given.to_yaml())
        assert load_config(["--config", str(tmp_path / "x.yaml")]) == given
    assert set(yaml.safe_load(TrainConfig().to_yaml())["optimizer"]) == set(OptimizerConfig.model_fields)


# ---- optimizers -------------------------------------------------------------------------------------------


PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}


def program_of(rule):
    """The text of a step: equal programs give equal updates and states, and none is compiled."""
    step = jax.jit(lambda params, grads: rule.update(grads, rule.init(params), params))
    return step.lower(PARAMS, PARAMS).as_text()


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
@pytest.mark.parametrize("name", OPTAX + OPTAX_CONTRIB)
def test_a_rule_by_its_name_is_optax_s_with_its_own_defaults(name):
    rule = build_optimizer(OptimizerConfig(name=name, lr=0.1))
    room = optax if name in OPTAX else optax.contrib
    assert program_of(rule) == program_of(getattr(room, name)(learning_rate=0.1))
    assert rule.lr == 0.1


def mine(size: float, lr: float = 1.0):
    return optax.sgd(size * lr)


def without_rate(size: float = 0.25):
    return optax.sgd(size)


made = optax.sgd(0.5)


ADAN = {"name": "adan", "options": {"b3": 0.5}, "weight_decay": 0.3}


@pytest.mark.parametrize(
    ("section", "wanted", "lr"),
    [
        (ADAN | {"lr": 0.1}, optax.adan(0.1, b3=0.5, weight_decay=0.3), 0.1),
        ({"name": "nadam", "lr": 0.1, "betas": (0.5, 0.6)}, optax.nadam(0.1, b1=0.5, b2=0.6), 0.1),
        ({"name": "adagrad", "lr": 0.1, "eps": 1e-10}, cx.AdaGradOptimizer(0.1), 0.1),
        ({"name": "rmsprop", "lr": 0.1, "momentum": 0.0}, cx.RMSPropOptimizer(0.1), 0.1),
        ({"name": "adam", "lr": 0.1, "options": {"nesterov": True}}, optax.adam(0.1, nesterov=True), 0.1),
        ({"name": f"{HERE}:mine", "lr": 0.5, "options": {"size": 0.1}}, optax.sgd(0.05), 0.5),
        ({"name": f"{HERE}:without_rate"}, optax.sgd(0.25), None),
        ({"name": f"{HERE}:made"}, optax.sgd(0.5), None),
    ],
)
def test_options_are_the_rule_s_own_and_ours_have_their_keys(section, wanted, lr):
    rule = build_optimizer(OptimizerConfig(**section))
    assert program_of(rule) == program_of(wanted)
    assert getattr(rule, "lr", None) == lr


def freezing():
    return cx.with_groups(cx.SGDOptimizer(0.1), [{"match": "a", "frozen": True}])


def test_groups_of_one_s_own_rule_freeze():
    rule = build_optimizer(OptimizerConfig(name=f"{HERE}:freezing"))
    assert (rule.is_frozen("a"), rule.is_frozen("b")) == (True, False)


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
    with refused(key):
        build_optimizer(OptimizerConfig(**values))


# ---- schedules --------------------------------------------------------------------------------------------


def halved(step):
    return 0.5**step


def halving(every=2):
    return lambda step: 0.5 ** (step // every)


def cycle(rate):
    return {"init_value": rate, "peak_value": rate, "warmup_steps": 1, "decay_steps": 2}


def rates(**section):
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
        (  # as a configuration file gives it
            {"name": "piecewise_constant_schedule", "options": {"boundaries_and_scales": {"1": 0.1}}},
            [0.5, 1, 1, 0.1, 0.1],
        ),
        (
            {"name": "sgdr_schedule", "options": {"cosine_kwargs": [cycle(1.0), cycle(0.5)]}},
            [0.5, 1, 1, 1, 0.5],
        ),
        ({"name": f"{HERE}:halved"}, [0.5, 1, 1, 0.5, 0.25]),
        ({"name": f"{HERE}:halving", "options": {"every": 1}}, [0.5, 1, 1, 0.5, 0.25]),
    ],
)
def test_a_section_names_a_schedule_of_optax_or_one_s_own(section, expected):
    factor = build_schedule(rates(**section))
    assert [float(factor(step)) for step in range(5)] == pytest.approx(expected)
    assert all(callable(getattr(optax, name)) for name in OPTAX_SCHEDULES)


def test_options_that_a_schedule_does_not_take_are_refused_and_not_ignored():
    for name in SCHEDULES:
        with refused("schedule.options.alpha"):
            rates(name=name, options={"alpha": 0.5})
    with pytest.raises(ConfigError, match="'exponential_decay' .*'decay'.*'decay_rate'"):
        build_schedule(rates(name="exponential_decay", options={"decay": 1}))


def test_a_schedule_is_a_rate_or_a_factor_and_both_are_recorded(two_devices):
    cosine = optax.cosine_decay_schedule(0.1, 3)
    settings = config(epochs=1, shuffle=False)
    kinds = (
        (cx.SGDOptimizer(cosine), {}, [float(cosine(2))]),
        (cx.SGDOptimizer(0.1), {"schedule": lambda step: cosine(step) / 0.1}, [float(cosine(2))]),
        (cx.SGDOptimizer(0.1), {"lr_schedule": cosine}, [float(cosine(2))]),
        (optax.sgd(cosine), {}, []),
    )
    found = []
    for optimizer, words, recorded in kinds:
        train = cx.DistributedTrainer(linen.Dense(3), "cross_entropy", optimizer)
        assert train.fit(X[:24], Y[:24], settings, **words).learning_rates == pytest.approx(recorded)
        found.append(train.params)
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0], other)
    assert build_schedule(RatePlan("own", 2.0, own=halved))(1) == 1.0


# ---- losses and metrics -----------------------------------------------------------------------------------


def half(output, target, factor=0.5):
    return factor * (output - target) ** 2


def loss(name, **options):
    return loss_of(TrainConfig(loss={"name": name, "options": options}).loss, "mlp", INFO)


def test_a_loss_by_its_name_takes_options():
    assert {name: type(loss(name)) for name in LOSSES} == {name: type(one) for name, one in LOSSES.items()}
    assert loss("cross_entropy", label_smoothing=0.1).label_smoothing == 0.1
    assert loss("auto", ignore_index=0).ignore_index == 0
    assert loss(f"{HERE}:half", factor=2.0)(np.float32(3), np.float32(1)) == 8.0
    assert TrainConfig(loss={"name": "mse"}).loss == "mse"  # the form in earlier run folders


@pytest.mark.parametrize(
    ("value", "task", "message"),
    [
        ({"name": "cross_entropy", "options": {"smooth": 0.1}}, INFO.task, "'cross_entropy' .*'smooth'"),
        (
            {"name": "cross_entropy", "options": {"label_smoothing": "much"}},
            INFO.task,
            "label_smoothing='much'",
        ),
        ({"name": "model", "options": {"beta": 2}}, INFO.task, "'model' .*'beta'"),
        ({"name": "msee", "options": {"by": 2}}, INFO.task, "loss='msee'.*'mse'"),
        ({"nam": "mse"}, INFO.task, "loss = .*expected"),
        ("auto", "ranking", "'ranking'"),
    ],
)
def test_what_is_no_loss_or_no_option_of_it_is_refused(value, task, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(TrainConfig(loss=value).loss, "mlp", replace(INFO, task=task))


def test_named_metrics_leave_out_the_label_that_the_loss_ignores():
    config = TrainConfig(metrics=({"name": "top_k", "options": {"k": 1}}, "per_class"))
    found = metrics_of(config.metrics, INFO, cx.CrossEntropyLoss(ignore_index=2))
    output, target = jnp.eye(3)[jnp.array([0, 2, 1])], jnp.array([0, 0, 2])
    means = found.means(np.asarray(jax.jit(found.sums)(jnp.ones(3), output, target, jnp.ones(3))))
    assert (means["top_k"], means["precision_b"]) == pytest.approx((0.5, np.nan), nan_ok=True)


@pytest.mark.parametrize("name", METRICS)
def test_each_name_makes_its_metric(name):
    one = {"name": name, "options": {"k": 2} if name == "top_k" else {}}
    found = metrics_of((one,), INFO)
    assert found.num_rows > metrics_of((), INFO).num_rows
    assert name != "per_class" or {"recall_a", "precision_c"} <= set(found.names)


def test_two_metrics_of_one_name_are_refused():
    twice = [{"name": "top_k", "options": {"k": k}} for k in (2, 3)]
    with pytest.raises(ConfigError, match="'top_k'"):
        metrics_of(twice, INFO)


def test_an_accuracy_that_is_named_is_the_one_of_every_task():
    found = metrics_of(TrainConfig(metrics=({"name": "accuracy"}, "f1")).metrics, INFO)
    assert found.names[:2] == ("loss", "accuracy")
    assert found.num_rows == metrics_of(TrainConfig(metrics=("f1",)).metrics, INFO).num_rows


# ---- augmentations ----------------------------------------------------------------------------------------


def augmentation(*words):
    return augment_of(load_config(["--run-dir", "nowhere", "--data.augment", *words]).data)


def test_augmentations_by_name():
    key, image = jax.random.key(1), np.zeros((1, 8, 8, 3), np.float32)
    assert augmentation("[]") is None
    assert (augmentation(f"{HERE}:shake")(key, X[0]) == shake(key, X[0])).all()
    twice = augmentation(f"{HERE}:shake", f"{HERE}:shake")(key, X[0])
    assert (twice == as_augment([shake, shake])(key, X[0])).all()
    with refused("data.augment.0", match="'random_flip_left_right'"):
        check_augment(augmentation("random_flip_left_rigth"), image)
    with pytest.raises(ConfigError, match=f"'{HERE}:shake'.* 'by'"):
        check_augment(augmentation(f"[{{name: '{HERE}:shake', options: {{by: 2}}}}]"), image)


def test_augmentations_of_dm_pix_by_name():
    pix = pytest.importorskip("dm_pix", reason="pip install 'cyxjax[pix]'")
    key, image = jax.random.key(3), np.random.default_rng(0).random((8, 8, 3), np.float32)
    bright = augmentation("[random_flip_up_down, {name: random_brightness, options: {max_delta: 0.2}}]")
    check_augment(bright, image[None])
    flipped = pix.random_flip_up_down(jax.random.fold_in(key, 0), image)
    assert (bright(key, image) == pix.random_brightness(jax.random.fold_in(key, 1), flipped, 0.2)).all()
