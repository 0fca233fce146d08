"""Several optimizers for named parameters in one step: a hand-written GAN on one device, and two replicas."""

from functools import partial
from shutil import rmtree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.core.model.adapter import adapt
from cyxjax.errors import ConfigError, DataError
from tests.support.models import Dense
from tests.support.trainers import (
    CLASSES,
    FEATURES,
    X,
    Y,
    after_fit,
    assert_near,
    by_hand,
    config,
    trained,
    use_devices,
)

pytestmark = pytest.mark.usefixtures("as_users_promote")

SAMPLES, WIDE, CLIP = 19, 4, 0.5  # batches of 8, 8 and 3
Z = np.random.default_rng(3).normal(size=(SAMPLES, WIDE)).astype(np.float32)
DATA = ((X[:SAMPLES], Z), Y[:SAMPLES])
rises = jax.nn.softplus


class Judge(linen.Module):
    @linen.compact
    def __call__(self, x):
        return Dense(1)(linen.tanh(x))[:, 0]


class Gan(linen.Module):
    def setup(self):
        self.generator, self.discriminator = Dense(FEATURES), Judge()

    def __call__(self, x, z):
        return {"real": self.discriminator(x), "fake": self.discriminator(self.generator(z))}


def fools(o, t):
    return rises(-o["fake"])


def tells(o, t):
    return rises(-o["real"]) + rises(o["fake"])


def weighs(o, t):
    """A discriminator loss that ignores class 0: its mean is over the others."""
    return tells(o, t), (t > 0).astype(jnp.float32)


def gan(every=2, offset=1):
    return cx.Task(
        {
            "fools": cx.Term(
                fools,
                0.5,
                trains="generator/*",
                optimizer=optax.adam(0.05),
                every=every,
                offset=offset,
            ),
            "tells": cx.Term(weighs, trains="discriminator/*", optimizer=optax.sgd(0.1, 0.9)),
        }
    )


GAN = gan()  # most trainers share its programs


def loss_by_hand(mine, name, params, batch):
    (x, z), y = batch
    o = Gan().apply({"params": params | {name: mine}}, x, z)
    if name == "generator":
        return 0.5 * fools(o, y).mean()
    losses, weights = weighs(o, y)
    return (losses * weights).sum() / weights.sum()


RULES = {
    name: optax.chain(optax.clip_by_global_norm(CLIP), rule)
    for name, rule in {"generator": optax.adam(0.05), "discriminator": optax.sgd(0.1, 0.9)}.items()
}


@partial(jax.jit, static_argnums=0)
def move_by_hand(name, params, state, batch):
    """(new parameters, new state) of `name` after one step of its own optimizer."""
    grads = jax.grad(loss_by_hand)(params[name], name, params, batch)
    updates, state = RULES[name].update(grads, state, params[name])
    return optax.apply_updates(params[name], updates), state


def gan_by_hand(every=2, offset=1, epochs=1, size=8):
    """Two losses, two gradients, two optimizers; each gradient is clipped by its own norm."""
    params = adapt(Gan()).init(jax.random.key(42), jax.tree.map(lambda a: a[:1], DATA[0]))[0]
    states = {name: rule.init(params[name]) for name, rule in RULES.items()}
    for step, first in enumerate([i for _ in range(epochs) for i in range(0, SAMPLES, size)]):
        batch, moved = jax.tree.map(lambda a, i=first: a[i : i + size], DATA), {}
        for name in RULES:
            if name == "discriminator" or step % every == offset:
                moved[name], states[name] = move_by_hand(name, params, states[name], batch)
        params = params | moved
    return params


def in_turns(task, schedule=None, **options):
    train = cx.distributed.DistributedTrainer(Gan(), task)
    settings = {"epochs": 1, "batch_size": 4, "shuffle": False, "max_grad_norm": CLIP} | options
    return train, train.fit(*DATA, config(**settings), schedule=schedule)


# Adam's step is a quotient of small numbers: rounding of sums in a different order.
assert_same = partial(assert_near, rtol=1e-3, atol=2e-5)


STEPS = {
    "mean": {},
    "zero1": {"comm": "zero1"},
    "fsdp, in turns of two micro-batches": {
        "comm": "fsdp",
        "gradient_accumulation_steps": 2,
        "batch_size": 2,
    },
    "exact": {
        "reproducibility": "exact",
        "virtual_replicas": 2,
        "global_batch_size": 8,
        "batch_size": None,
        "exact_threads": 8,
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * ("in turns" not in n)) for n in STEPS]
)
def test_each_optimizer_moves_its_own_by_its_own_loss_in_its_turn(name, two_devices):
    train, history = in_turns(GAN, **STEPS[name])
    assert_same(train.params, gan_by_hand())
    metrics = history.metrics
    assert history.train_losses[0] == pytest.approx(
        0.5 * metrics["train_fools"][0] + metrics["train_tells"][0], rel=0.05
    )


def test_a_schedule_counts_the_steps_of_the_run_also_for_terms_in_turns(two_devices):
    """Of the steps 0 to 3 the generator has 1 and 3, and the factor is 0 from step 3 on."""
    train, _ = in_turns(GAN, lambda step: jnp.where(step < 3, 1.0, 0.0), epochs=2, max_steps=4)
    stopped, _ = in_turns(GAN)  # three steps
    jax.tree.map(np.testing.assert_array_equal, train.params, stopped.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"comm": "power_sgd", "comm_options": {"rank": 2, "min_compression": 0}},
        {"comm": "fp16", "precision": "float16"},
    ],
    ids=("power_sgd", "float16"),
)
def test_what_rounds_trains_all_groups(options, two_devices):
    train, history = in_turns(gan(1, 0), **options)
    assert history.skipped_steps == 0  # the numbers do not overflow at float16's first scale
    assert_same(train.params, gan_by_hand(1, 0), atol=1e-3)


def test_a_turn_and_its_optimizer_are_in_the_checkpoint(tmp_path, two_devices):
    kept = {"checkpoint_every_n_epochs": 1, "checkpoint_dir": str(tmp_path), "epochs": 2}
    whole = in_turns(GAN, **kept)[0].params
    rmtree(max(tmp_path.glob("step_*")))  # the newest after three steps: the next one is the generator's turn
    train, history = in_turns(GAN, **kept)
    assert len(history.train_losses) == 2
    jax.tree.map(np.testing.assert_array_equal, train.params, whole)
    use_devices(1)
    other = in_turns(GAN, **kept | {"comm": "zero1", "batch_size": 8, "epochs": 3})[0]
    assert_same(other.params, gan_by_hand(epochs=3), atol=1e-4)


class Agent(linen.Module):
    """An actor and a critic on one trunk."""

    @linen.compact
    def __call__(self, x):
        h = linen.tanh(Dense(5, name="trunk")(x))
        return Dense(CLASSES, name="actor")(h), Dense(1, name="critic")(h)[:, 0]


def acts(o, t):
    advantage = jax.lax.stop_gradient(t["return"] - o[1])
    log_p = jnp.take_along_axis(jax.nn.log_softmax(o[0]), t["action"][:, None], 1)[:, 0]
    return -log_p * advantage


def values(o, t):
    return jnp.square(o[1] - t["return"])


def test_a_trunk_that_two_terms_train_gets_both_gradients_and_heads_their_own():
    x, y = X[:SAMPLES], {"action": Y[:SAMPLES], "return": X[:SAMPLES].sum(1)}
    task = cx.Task(
        {
            "acts": cx.Term(acts, trains=("actor/*", "trunk/*")),
            "values": cx.Term(values, 0.5, trains=("critic/*", "trunk/*")),
        }
    )
    params, _ = by_hand(Agent(), lambda o, t: (acts(o, t) + 0.5 * values(o, t)).mean(), x, y)
    assert_same(trained(Agent(), task, x, y).params, params, rtol=1e-4)


SGD, OTHER = optax.sgd(0.1), optax.sgd(1.0)
MISSPELT = {"a": cx.Term(fools, trains="generater/*", optimizer=SGD), "b": tells}


@pytest.mark.parametrize(
    ("terms", "optimizer", "message"),
    [
        ({"a": cx.Term(fools, trains="generator/*", optimizer=SGD)}, None, "'discriminator/Dense_0/bias'"),
        (
            {
                "a": cx.Term(fools, trains="*", optimizer=SGD),
                "b": cx.Term(tells, trains="disc*", optimizer=OTHER),
            },
            None,
            "'discriminator/Dense_0/bias' .*'a' .*'b'",
        ),
        (MISSPELT, SGD, r"'a' .*'generater/\*'.* 'generator/"),
        (MISSPELT, None, r"optimizer .*'b'.*Term\("),
    ],
)
def test_a_task_of_groups_that_means_nothing_is_refused_before_training(
    terms, optimizer, message, two_devices
):
    with pytest.raises(ConfigError, match=message):
        cx.distributed.DistributedTrainer(Gan(), cx.Task(terms), optimizer).fit(*DATA, config())


def test_a_term_without_parameters_of_its_own_and_a_loop_by_hand_are_refused(two_devices):
    for turn in ({"trains": "a", "every": 2, "offset": 2}, {"optimizer": SGD}):
        with pytest.raises(ConfigError, match="offset.*`trains`.*HINT"):
            cx.Term(fools, **turn)
    ddp = cx.distributed.DistributedDataParallel(Gan())
    with pytest.raises(DataError, match="Task .*DistributedTrainer"):
        ddp.loss(gan(), ddp(DATA[0]), DATA[1])


@pytest.mark.parametrize(
    ("make", "comm"),
    [
        (lambda: optax.polyak_sgd(0.5), "mean"),
        (
            lambda: optax.chain(
                optax.sgd(0.5), optax.contrib.reduce_on_plateau(0.5, patience=1, accumulation_size=1)
            ),
            "zero1",
        ),
    ],
    ids=("polyak", "plateau"),
)
def test_a_rule_that_asks_for_the_loss_is_told_that_of_the_global_batch(make, comm, two_devices):
    x, y, model = X[:SAMPLES], Y[:SAMPLES], Dense(CLASSES)
    train = after_fit(x, y, config(shuffle=False, comm=comm), model=model, optimizer=make())
    mean = lambda o, t: optax.softmax_cross_entropy_with_integer_labels(o, t).mean()  # noqa: E731
    rule = make()  # by hand in one program instead of one per operation and shape
    params, _ = by_hand(model, mean, x, y, epochs=2, rule=rule._replace(update=jax.jit(rule.update)))
    assert_same(train.params, params, rtol=1e-4)
