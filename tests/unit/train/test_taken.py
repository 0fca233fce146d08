"""Samples that the model or the loss does not take are refused in one line, before a step is made of them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import cyxjax as cx
from cyxjax.data.sources import as_batches
from cyxjax.distributed import ddp_values
from cyxjax.errors import ConfigError, DataError
from cyxjax.train.feeding.loader_batches import _deal
from tests.support.trainers import VAL, X, Y, config, trainer, use_devices

BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]
R = (Y > 0).astype(np.float32)
CE = optax.softmax_cross_entropy_with_integer_labels


class Column(linen.Module):
    """One number a sample, (N, 1)."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(x)


class Loader:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Triples:
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i], np.float32(1)


@pytest.fixture(autouse=True)
def one_device(own_group):
    use_devices(1)


@pytest.fixture
def as_users_have_it():
    """jax's own rules of promotion, of which the tests' are stricter."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def of(model, loss):
    return cx.distributed.DistributedTrainer(model, loss, cx.SGDOptimizer(0.1))


@pytest.mark.parametrize(
    "val",
    [(VAL[0][:, :3], VAL[1]), Loader([(X[:8, :3], Y[:8])]), [(x[:3], y) for x, y in zip(*VAL, strict=True)]],
)
def test_validation_data_of_another_width_is_refused_before_a_step(val):
    said = r"^validation .*float32\[N, 3\].* float32\[N, 6\]"
    with pytest.raises(DataError, match=said):
        trainer().prepare((X, Y) if isinstance(val, tuple | list) else Loader(BATCHES), val, config=config())
    with pytest.raises(DataError, match="^validation .*drop_last"):
        trainer().prepare(Loader(BATCHES), Loader([]), config=config())


def test_a_batch_of_another_width_in_the_middle_is_named():
    odd = [*BATCHES[:2], (X[:8, :3], Y[:8])]
    with pytest.raises(DataError, match=r"^training .*batch 2: .*float32\[N, 3\]"):
        trainer().fit(Loader(odd), config(epochs=1))


@pytest.mark.parametrize(("odd", "said"), [(None, "None"), ((X[:0], Y[:0]), "0 samples")])
def test_a_batch_of_nothing_is_named(odd, said):
    with pytest.raises(DataError, match=f"batch 2 .*{said}"):
        list(as_batches([*BATCHES[:2], odd]))


def test_batches_of_one_step_have_one_shape():
    with pytest.raises(DataError, match=r"\(3,\), \(6,\).*gradient_accumulation_steps"):
        _deal([BATCHES[0], (X[:8, :3], Y[:8])], 1, 2, 8)


@pytest.mark.parametrize(
    "data", [Triples(), Loader([(x, y, np.ones(8, np.float32)) for x, y in BATCHES]), (X, Y, R)]
)
def test_samples_with_a_weight_are_refused_with_the_form_that_works(data):
    with pytest.raises(DataError, match=r"sample .* 3 .*float32\[N, 6\].* 1 .*\[N\]"):
        of(linen.Dense(3), CE).prepare(data, config=config())
    weighed = lambda out, t: (CE(out, t["y"]), t["w"])  # noqa: E731  as the hint says
    cx.distributed.DistributedTrainer(linen.Dense(3), weighed, cx.SGDOptimizer(0.1)).prepare(
        X, {"y": Y, "w": R}, config=config()
    )


@pytest.mark.parametrize(
    ("loss", "y", "said"),
    [
        (CE, Y[:, None], r"float32\[4, 3\].*int32\[4, 1\].* y\[:, 0\]"),
        (optax.softmax_cross_entropy, Y, r"float32\[4, 3\].*int32\[4\].* loss\(output, t"),
        (cx.NLLLoss(), R, r"NLLLoss: .*float32\[4, 3\] .*float32\[4\]"),  # cut to int
        (cx.CrossEntropyLoss(), Y[:, None], r"CrossEntropyLoss: .*int32\[4, 1\].* y\[:, 0\]"),
    ],
    ids=["optax", "soft", "nll", "ours"],
)
def test_targets_that_a_loss_does_not_take(loss, y, said):
    with pytest.raises(DataError, match=said):
        of(linen.Dense(3), loss).prepare(X, y, config=config())


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (o - t) ** 2,
        lambda o, t: ((o - t) ** 2).mean(),
        lambda o, t: ((o - t) ** 2, jnp.ones_like(o - t)),
        cx.Task({"one": lambda o, t: optax.huber_loss(o, t).mean()}),
    ],
    ids=["each", "mean", "pairs", "task"],
)
def test_a_loss_that_compares_each_sample_with_all_is_refused_where_the_batch_is_split(
    loss, as_users_have_it
):
    """(N, 1) and (N,) make (N, N)."""
    use_devices(2)
    with pytest.raises(ConfigError):
        of(Column(), loss).fit(X, R, config())
    one = of(Column(), loss)
    one.fit(X, R[:, None], config())
    with pytest.raises(ConfigError):
        one.evaluate(X, R)


@pytest.mark.parametrize("loss", [cx.MSELoss(), cx.L1Loss(), cx.HuberLoss(), cx.BCEWithLogitsLoss()])
def test_no_loss_of_ours_spreads(loss):
    for output, target in (((8, 1), (8,)), ((8,), (8, 1)), ((8, 3), (8, 1))):
        with pytest.raises(DataError, match=f"{type(loss).__name__}: .*float32"):
            loss(jnp.zeros(output), jnp.zeros(target))


def test_the_facade_refuses_words():
    torch_like = SimpleNamespace(dtype=SimpleNamespace())  # its dtypes have no kind
    for words in (np.array(["ant", "bee"]), ["ant", "bee"], {"y": np.array(["ant", "bee"], object)}):
        with pytest.raises(DataError, match="'ant'.*np.unique"):
            ddp_values.no_words(words)
    for numbers in (Y, jnp.ones(2, jnp.bfloat16), {"key": jax.random.key(0)}, torch_like):
        assert ddp_values.no_words(numbers) is numbers
